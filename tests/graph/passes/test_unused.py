"""drop_unused: operations without users go, those with effects stay."""

from __future__ import annotations

from typing import Any

import torch

import funcshard as fs


def test_only_operations_without_users_and_effects_go(full_shard: Any) -> None:
    def add(step_graph: Any) -> Any:
        new = step_graph.copy()
        first, *_, output = new.graph.nodes
        with new.graph.inserting_before(output):
            for operation, *args in (
                (torch.ops.aten.neg.default,),
                (torch.ops.aten.mul_.Tensor, 1),
                (torch.ops.aten.bernoulli.p, 0.5),
            ):
                new.graph.call_function(operation, (first, *args)).meta["val"] = first.meta["val"]
        return new

    more = full_shard.changed(add)
    lines = [line.partition("= ")[2] for line in str(fs.passes.drop_unused(more)).splitlines()]
    assert "neg %0" in str(more)
    assert [line for line in lines if line in ("neg %0", "mul_ %0 1", "bernoulli %0 0.5")] == [
        "mul_ %0 1",
        "bernoulli %0 0.5",
    ]
    assert str(fs.passes.drop_unused(full_shard)) == str(full_shard)
