"""Programs that run dry on graphs: recorded, changed, compiled, saved and loaded steps."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

import funcshard as fs
from benchmarks.dry.mode import DryCuda, current_mode, is_dry
from benchmarks.dry.steps import Made, batch_of, check_state, made

__all__ = ["change", "compiled", "draw_again", "load", "trace"]

_PASSES: dict[str, dict[str, Any]] = {
    "keep_gathered": {"budget": "1MB"},
    "gather_earlier": {"by": 1},
    "wait_later": {},
    "update_early": {},
    "drop_unused": {},
}


def trace(mesh: fs.Mesh, **options: Any) -> None:
    """Record a step, and take three steps with the recordings, in which the host hardly waits more often."""
    run = made(mesh, **options)
    traced = fs.trace(run.step, run.state, batch_of(mesh))
    _run(run, traced)
    if not is_dry():
        return
    mode, number = current_mode(DryCuda), []
    for step in (run.step, traced):
        state, _ = step(fs.copy(run.state), batch_of(mesh))
        before = len(mode.waits)
        step(state, batch_of(mesh))
        number.append(len(mode.waits) - before)
    assert number[1] <= number[0] + 1, f"the host waits {number[1]} times in the graph, and {number[0]} times in the step"


def draw_again(mesh: fs.Mesh, *, compiles: bool = False, **options: Any) -> None:
    """Check that a recorded step draws the random numbers of the step, and some of them again."""
    run = made(mesh, remat=("blocks.0", "blocks.1"), dropout=0.5, **options)
    traced = fs.trace(run.step, run.state, batch_of(mesh))
    steps = [run.step, traced, *([traced.compile(backend="eager")] if compiles else [])]
    eager, *recorded = [_drawn(step, run) for step in steps]
    if is_dry():
        twice = sorted(2 * sorted(set(eager)))
        assert sorted(eager) == twice, f"a block drew other numbers in backward; positions {eager}"
    assert all(each == eager for each in recorded), f"graphs draw numbers at {recorded}, and the step at {eager}"


def _drawn(step: Any, run: Made) -> list[Any]:
    """Return the positions at which a step draws numbers; if it does not run dry, two losses in place of them."""
    if not is_dry():
        torch.manual_seed(7)
        state, first = step(fs.copy(run.state), batch_of(run.mesh))
        return [each["loss"].item() for each in (first, step(state, batch_of(run.mesh))[1])]
    generator = current_mode(DryCuda).generator
    before, begin = len(generator.draws), generator.position
    step(fs.copy(run.state), batch_of(run.mesh))
    return [draw - begin for draw in generator.draws[before:]]


def change(mesh: fs.Mesh, **options: Any) -> None:
    """Run a recorded step after each pass."""
    run = made(mesh, **options)
    traced = fs.trace(run.step, run.state, batch_of(mesh))
    for name, given in _PASSES.items():
        changed = getattr(fs.passes, name)(traced, **given)
        changed.memory(), changed.cost(), str(changed)
        _run(run, changed)


def compiled(mesh: fs.Mesh, **options: Any) -> None:
    """Compile a recorded step without code for a device, and run it."""
    run = made(mesh, **options)
    _run(run, fs.trace(run.step, run.state, batch_of(mesh)).compile(backend="eager"))


def load(mesh: fs.Mesh, **options: Any) -> None:
    """Save a recorded step as text, load it, and run it."""
    run = made(mesh, **options)
    traced = fs.trace(run.step, run.state, batch_of(mesh))
    file = Path(tempfile.gettempdir()) / f"dry-{os.getpid()}.graph"  # the same on all simulated ranks
    with _disable_current_modes():  # the constants of a graph are no fake tensors
        traced.save(file)
        loaded = fs.load_traced(file, mesh, step=run.step)
    file.unlink(missing_ok=True)
    _run(run, loaded)


def _run(run: Any, traced: Any, steps: int = 3) -> None:
    state = fs.copy(run.state)
    for _ in range(steps):
        state, metrics = traced(state, batch_of(run.mesh))
    check_state(run, state, metrics)
