"""keep_gathered: the second gather goes, as far as the budget reaches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import funcshard as fs

UNIT = 4 * (2 * 64 * 256 + 256 + 64)  # bytes of a gathered block


def gathers(traced: Any) -> list[str]:
    return [event.unit for event in traced.events if event.kind == "all_gather"]


@pytest.mark.parametrize(
    ("budget", "again"),
    [
        pytest.param(UNIT - 1, [3, 2, 1, 0], id="too little for any"),
        pytest.param(UNIT, [2, 1, 0], id="one unit: the last of forward"),
        pytest.param(3 * UNIT + 5, [0], id="three units"),
        pytest.param("1GiB", [], id="all"),
    ],
)
def test_the_units_that_forward_ends_with_stay_as_far_as_the_budget_reaches(full_shard, budget, again) -> None:
    kept = fs.passes.keep_gathered(full_shard, budget=budget)
    blocks = [f"blocks.{number}" for number in (*range(4), *again)]
    assert gathers(kept) == blocks
    more = kept.memory().peak_gathered - full_shard.memory().peak_gathered
    # Two blocks are gathered at once in any case.
    assert more == max(0, 2 - len(again)) * UNIT


def test_a_shard_that_is_written_to_in_between_is_gathered_again(full_shard: Any) -> None:
    def write(step_graph: Any) -> Any:
        new = step_graph.copy()
        shard = next(iter(new.graph.nodes))
        second = [node for node in new.graph.nodes if node.args and node.args[0] is shard and "all_gather" in node.name][1]
        with new.graph.inserting_before(second):
            node = new.graph.call_function(torch.ops.aten.mul_.Tensor, (shard, 1))
        node.meta["val"] = shard.meta["val"]
        return new

    traced = full_shard.changed(write)
    assert set(gathers(traced)) == {f"blocks.{number}" for number in range(4)}
    assert gathers(fs.passes.keep_gathered(traced, budget="1GiB"))[4:] == ["blocks.0"]
