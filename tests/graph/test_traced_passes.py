"""Each pass, and all passes in a row, keep the bits of the step, and the collectives are those of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import funcshard as fs
from tests.graph.test_memory import made as made_blocks
from tests.graph.test_memory import measured
from tests.graph.test_traced import ADAMW, BFLOAT16, HYBRID, batch_of, made, same, steps, torch_optimizer
from tests.ranks import on_ranks, run_ranks

SIZES = (4, 4, 4)
Pass = Callable[[Any], Any]

PASSES: dict[str, Pass] = {
    "keep_gathered": lambda traced: fs.passes.keep_gathered(traced, budget="1MiB"),
    "gather_earlier": lambda traced: fs.passes.gather_earlier(traced, budget="1MiB"),
    "wait_later": lambda traced: fs.passes.wait_later(traced, budget="1MiB"),
    "update_early": fs.passes.update_early,
}


def in_a_row(traced: Any) -> Any:
    for each in PASSES.values():
        traced = each(traced)
    return traced


SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "remat, dropout, offload, buckets": (2, {
        "remat": ("blocks.0", "blocks.1"), "dropout": 0.5, "plan": {"offload": True, "bucket_bytes": 600},
        "optimizer": torch_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    }),
    "hybrid, bfloat16, kept after forward, micro-batches": (HYBRID, {
        "plan": {"strategy": "shard_grad_op", "precision": BFLOAT16}, "accumulate": 2,
        "optimizer": torch_optimizer(ADAMW, lr=1e-2, fused=True),
    }),
}  # fmt: skip


def compare(mesh: fs.Mesh, passes: dict[str, Pass], **options: Any) -> dict[str, tuple[Any, Any]]:
    """Return each changed step, with the state after it took some steps."""
    step, state = made(mesh, **options)
    traced = fs.trace(step, state, batch_of(mesh, 0))
    text = str(traced)
    changed = {name: change(traced) for name, change in passes.items()}
    copies = {name: fs.copy(state) for name in changed}
    eager = steps(mesh, step, state, SIZES)
    found = {}
    for name, take in changed.items():
        metrics, state, events = steps(mesh, take, copies[name], SIZES)
        assert same((metrics, state), eager[:2]), name
        found[name] = take, state
        assert list(take.events) == events[-1], name
    assert str(traced) == text, "a pass leaves its argument as it is"
    return found


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_all_passes_in_a_row_keep_the_bits(setting: str) -> None:
    ranks, options = SETTINGS[setting]
    texts = fs.simulate(lambda mesh: str(compare(mesh, {"in a row": in_a_row}, **options)["in a row"][0]), ranks)
    assert len(set(texts)) == 1, "every rank makes the same changes"


@pytest.mark.nightly
@on_ranks(2)
def test_each_pass_keeps_the_bits_in_later_recordings_too(mesh: fs.Mesh) -> None:
    kept, state = compare(mesh, PASSES)["keep_gathered"]
    with fs.record_events() as events:
        kept(state, batch_of(mesh, 0, size=2))
    assert events == list(kept.events)
    assert [event.unit for event in events if event.kind == "all_gather"] == ["", "embed", "blocks.0", "blocks.1"]


def _on_processes(mesh: fs.Mesh) -> None:
    step, state = made(mesh)
    traced = in_a_row(fs.trace(step, state, batch_of(mesh, 0)))
    copied = fs.copy(state)
    assert same(steps(mesh, traced, state, SIZES)[:2], steps(mesh, step, copied, SIZES)[:2])


@pytest.mark.nightly
def test_processes_get_the_same_bits_from_all_passes() -> None:
    run_ranks(_on_processes, 2)


@pytest.mark.nightly
def test_the_memory_of_a_changed_step_is_that_of_a_run() -> None:
    batch = torch.randn(2, 64)
    step, state = made_blocks()
    traced = fs.trace(step, state, batch)
    for name, change in PASSES.items():
        changed = change(traced)
        found = changed.memory()
        assert measured(changed, fs.copy(state), batch) == (found.peak, found.peak_gathered), name
        assert found.peak < traced.memory().peak or name != "update_early"


@pytest.mark.slow
def test_only_operations_without_users_and_effects_go(full_shard: Any) -> None:
    def add(step_graph: Any) -> Any:
        new = step_graph.copy()
        first, *_, output = new.graph.nodes
        with new.graph.inserting_before(output):
            aten = torch.ops.aten
            for operation, *args in ((aten.neg.default,), (aten.mul_.Tensor, 1), (aten.bernoulli.p, 0.5)):
                new.graph.call_function(operation, (first, *args)).meta["val"] = first.meta["val"]
        return new

    more = full_shard.changed(add)
    tidied = fs.passes.keep_gathered(more, budget=1)  # which keeps no unit
    lines = [line.partition("= ")[2] for line in str(tidied).splitlines()]
    assert "neg %0" in str(more)
    assert [line for line in lines if line.startswith(("neg %0", "mul_ %0 ", "bern"))] == ["mul_ %0 1", "bernoulli %0 0.5"]
    assert str(fs.passes.keep_gathered(full_shard, budget=1)) == str(full_shard)
