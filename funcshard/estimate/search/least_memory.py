"""``least_peak``: memory that a step needs at least, without the walk through all its collectives.

It follows the rules of ``walk.simulator`` for memory that a rank surely holds: shards, that of the
model, the unit that computes, the units that stay gathered, and reductions. Gathers ahead, casts of
shards and copies are left out. So the result is at most the simulated peak, in a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from funcshard.estimate.trace import Program, Run
from funcshard.estimate.walk import Runtime, UnitSizes

__all__ = ["UnitMemory", "least_peak", "unit_memory"]


class UnitMemory(NamedTuple):
    """Bytes of a unit, as far as ``least_peak`` counts them.

    Attributes:
        gathered: the gathered buffers.
        slice: the slice that the rank keeps after forward.
        stays: whether the unit stays gathered between forward and backward.
        trained: whether a leaf gets gradients.
        reductions: for each buffer that is reduced, in the order of backward: bytes that are freed
            when it starts, the send buffer, the rank's part, and the same as the optimizer gets it.
    """

    gathered: int
    slice: int
    stays: bool
    trained: bool
    reductions: tuple[tuple[int, int, int, int], ...]


def unit_memory(sizes: UnitSizes, runtime: Runtime) -> UnitMemory:
    """Return the bytes of a unit from all its sizes."""
    reductions = tuple(
        (
            each.full_before_cast,
            each.full if each.cut and runtime.send_buffers else 0,
            each.reduced,
            0 if sizes.offload else each.kept,
        )
        for each in reversed(sizes.buffers)
        if each.trainable and each.grads
    )
    gathered = sum(each.gathered for each in sizes.buffers)
    return UnitMemory(gathered, sizes.slice, sizes.stays, any(each.trainable for each in sizes.buffers), reductions)


def least_peak(program: Program, units: Mapping[str, UnitMemory], runtime: Runtime, *, reduces: bool) -> int:
    """Return bytes that the peak never goes below, beside what the rank holds between steps.

    Arguments:
        program: the computations of the model.
        units: bytes of the units by name.
        runtime: how ranks communicate.
        reduces: whether to count the buffers of reductions. Units in buckets reduce later.
    """
    held: dict[str, int] = {}
    running: list[tuple[int, int, int]] = []  # send buffer, part, and part for the optimizer
    frees_first = runtime.frees_first or not runtime.accelerator
    most = more = tape = 0  # ``more``: bytes beside those of the model
    for step in program.steps:
        if isinstance(step, Run):
            most = max(most, more + step.highest.total)
            tape = step.end.total
            continue
        unit = units.get(step.unit)
        if unit is None:
            continue
        name, before = step.unit, held.get(step.unit, 0)
        if step.what in ("forward", "need"):
            held[name] = max(before, unit.gathered)
        elif step.what == "return" and (not unit.stays or (not unit.trained and name in program.not_saved)):
            held[name] = 0 if name in program.not_saved else unit.slice
        elif step.what in ("reduce", "leave"):
            held[name] = 0
        more += held.get(name, 0) - before
        most = max(most, more + tape)
        if step.what != "reduce" or not reduces:
            continue
        for cast, full, part, kept in unit.reductions:
            if running and frees_first:
                more -= running[-1][0]
                running[-1] = (0, *running[-1][1:])
            more += full + part
            most = max(most, more + cast + tape)
            running.append((full, part, kept))
        while len(running) > 1:
            more -= _left(*running.pop(0))
    return most


def _left(full: int, part: int, kept: int) -> int:
    """Return the bytes that are freed when a reduction is over."""
    return full + part - kept
