"""``splice``: the program of any remat set, from the programs of no unit and of all units.

A search tries many remat sets. A unit that backward computes again changes the steps of its own
forward and backward, and the memory under all others by a constant. So the steps of each unit come
from one of two programs, each step's memory counted from the step before its unit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from funcshard.estimate.program import Mark, Memory, Program, Run

__all__ = ["splice"]

_NONE = Memory(0, 0, 0, 0)


def splice(without: Program, again: Program, remat: frozenset[str]) -> Program | None:
    """Return the program in which backward computes the units of ``remat`` again.

    Arguments:
        without: the program in which it computes none again.
        again: the program in which it computes all units of ``remat`` again, and maybe more.
        remat: names of units.

    Returns:
        The program; ``None`` if units do not follow one another in both programs alike, as units
        inside others may not.
    """
    parts = [list(_parts(program.steps)) for program in (without, again)]
    if [part[0] for part in parts[0]] != [part[0] for part in parts[1]]:
        return None
    if any(len([1 for each in parts[0] if each[0] == name]) != 2 for name in remat):
        return None
    steps: list[Run | Mark] = []
    now = _NONE
    for plain, other in zip(*parts, strict=True):
        _name, begin, own = other if plain[0] in remat else plain
        moved = Memory(*(here - there for here, there in zip(now, begin, strict=True)))
        if any(moved):
            own = [step if isinstance(step, Mark) else _moved(step, moved) for step in own]
        steps += own
        now = next((step.end for step in reversed(own) if isinstance(step, Run)), now)
    backward = tuple(
        ("gather" if step.what == "need" else "reduce", step.unit)
        for step in steps
        if isinstance(step, Mark) and step.what in ("need", "reduce")
    )
    named = {False: without, True: again}
    spared = frozenset(name for name in without.not_saved | again.not_saved if name in named[name in remat].not_saved)
    saved = {
        name: size for name in (*without.saved, *again.saved) if (size := named[name in remat].saved.get(name)) is not None
    }
    return Program(tuple(steps), without.order, backward, spared, saved)


def _parts(steps: Sequence[Run | Mark]) -> Iterator[tuple[str, Memory, list[Run | Mark]]]:
    """Yield the steps of one unit after the other, with the memory before each."""
    begin = _NONE
    for name, group in itertools.groupby(steps, key=lambda step: step.unit):
        own = list(group)
        yield name, begin, own
        begin = next((step.end for step in reversed(own) if isinstance(step, Run)), begin)


def _moved(run: Run, moved: Memory) -> Run:
    """Return a run with some more memory all the time."""
    highest, end = (Memory(*map(int.__add__, each, moved)) for each in (run.highest, run.end))
    return Run(run.unit, run.what, run.work, highest, end)
