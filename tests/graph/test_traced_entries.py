"""One recording serves batches of any size, with the bits of the step; and a new one says why."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.graph.memory import sections_of
from tests.graph import linear as linear_step
from tests.graph import test_traced
from tests.graph.linear import same
from tests.graph.test_signatures import messages
from tests.graph.test_traced import PLAIN, batch_of, made, steps, torch_optimizer
from tests.ranks import on_ranks

SIZES = (4, 6, 10, 4)
NAMES = "b, ..."
CASES: dict[str, dict[str, Any]] = {
    "remat, dropout, micro-batches, a schedule": {
        "remat": ("blocks.0",), "dropout": 0.5, "accumulate": 2,
        "optimizer": torch_optimizer(torch.optim.SGD, lr=lambda step: 1 / (1 + step)),
    },
    "weights, scaler, mutable, clipped": {
        **test_traced.CASES["weights, scaler, mutable"][1], "max_norm": 1.0, "optimizer": PLAIN,
    },
}  # fmt: skip


def run(mesh: fs.Mesh, take: Any, state: Any) -> Any:
    return steps(mesh, take, state, [size + 2 * mesh.rank for size in SIZES])


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_one_recording_has_the_bits_and_collectives_of_the_step_for_batches_of_any_size(mesh: fs.Mesh, case: str) -> None:
    eager = run(mesh, *made(mesh, **CASES[case]))
    step, state = made(mesh, **CASES[case])
    traced = fs.trace(step, state, batch_of(mesh, 0), dynamic_shapes=NAMES)
    assert same(run(mesh, traced, state), eager)
    assert len(traced._entries) == 1


@pytest.mark.nightly
@on_ranks(2)
def test_passes_files_and_compiled_steps_serve_any_size_too(mesh: fs.Mesh, tmp_path: Path) -> None:
    eager = run(mesh, *made(mesh, optimizer=PLAIN))
    traced = fs.trace(*made(mesh, optimizer=PLAIN), batch_of(mesh, 0), dynamic_shapes=NAMES)
    traced.save(tmp_path / "step.json")
    loaded = fs.load_traced(tmp_path / "step.json", mesh)
    assert (str(loaded), loaded.fingerprint()) == (str(traced), traced.fingerprint())
    assert (loaded.sizes, loaded.conditions) == (traced.sizes, traced.conditions) == ({"b": 4}, ("b >= 2",))
    assert loaded.with_sizes(b=9).memory() == traced.with_sizes(b=9).memory()
    for step in (loaded, loaded.compile("eager"), traced.compile("eager"), traced.with_sizes(b=9)):
        assert same(run(mesh, step, made(mesh, optimizer=PLAIN)[1]), eager)
    kept = fs.passes.update_early(fs.passes.keep_gathered(traced, budget="1MiB"))
    assert same(run(mesh, fs.passes.wait_later(kept), made(mesh, optimizer=PLAIN)[1])[:2], eager[:2])


def linear(rest: Any = lambda x: x.square().mean()) -> Any:
    """Return a small step on one rank that leaves its state as it is, and the state."""
    return linear_step.made(fs.Mesh(), lambda f, x: rest(f(x)), donate=False)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(math.prod(shape))).view(shape)


@pytest.mark.slow
def test_memory_and_cost_of_other_sizes_are_those_of_a_recording_of_that_size() -> None:
    step, state = linear()
    traced, fixed = fs.trace(step, state, numbers(4, 3), dynamic_shapes=NAMES), fs.trace(step, state, numbers(9, 3))
    of_nine = traced.with_sizes(b=9)
    assert (of_nine.memory(), of_nine.cost(), of_nine.events) == (fixed.memory(), fixed.cost(), fixed.events)
    assert traced.memory() == fs.trace(step, state, numbers(4, 3)).memory()
    assert traced.memory() != of_nine.memory()
    text = str(of_nine)
    assert ":f32[b,3]" in text
    assert "shown for b = 9, and runs for all with b >= 2" in text
    assert next(sections_of(traced.graph.graph)).phase == "sizes"


AGAIN = {
    "a size of one": (lambda x: x.sum(), 1, "b >= 2 (torch)"),
    "a branch": (lambda x: x.sum() if x.shape[0] % 2 == 0 else x.mean(), 5, "(b % 2) == 0 (test_traced_entries.py, line"),
    "a number of Python": (lambda x: x.sum() / len(x), 6, "b == 4 (test_traced_entries.py, line"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", AGAIN)
def test_a_size_that_takes_another_way_is_recorded_anew_and_the_log_says_why(case: str) -> None:
    rest, size, words = AGAIN[case]
    step, state = linear(rest)
    traced = fs.trace(step, state, numbers(4, 3), dynamic_shapes=NAMES)
    with messages() as found:
        for each in (4, size, 4, size):
            assert same(traced(state, numbers(each, 3)), step(state, numbers(each, 3)))
    assert len(found) == 1
    assert f"trace records a step again: found b = {size}; the recording needs {words}" in found[0]


@pytest.mark.slow
def test_another_form_is_recorded_for_any_size_as_well() -> None:
    step, state = linear()
    traced = fs.trace(step, state, numbers(4, 3), dynamic_shapes=NAMES)
    with messages() as found:
        for shape in ((4, 3), (3, 5, 3), (7, 5, 3), (8, 3)):
            assert same(traced(state, numbers(*shape)), step(state, numbers(*shape)))
    (text,) = found
    assert "leaf `batch`: recorded float32[b, 3], found float32[b, 5, 3]" in text


@pytest.mark.slow
def test_a_batch_that_is_not_contiguous_is_served_with_its_own_strides() -> None:
    step, state = linear()
    whole = numbers(12, 6)
    for parts in ((whole[::2, :3][:4], whole[::2, :3]), (whole.T[:3].T[:4], whole.T.contiguous()[:3].T)):
        traced = fs.trace(step, state, parts[0], dynamic_shapes=NAMES)
        for part in parts:
            assert same(traced(state, part), step(state, part))
