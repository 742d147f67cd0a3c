"""``splice``: the program of one remat set from that of another, for models of many equal units.

A search tries to let backward compute the first 10, 20 or 30 of many equal units again. One trace
in which it computes some of them again has all the steps of such programs. Those of equal units
differ in names, and in the memory that was there before.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from funcshard.estimate.trace import Mark, Memory, Program, Run

MARGIN = 3  # units on each side of a border whose steps may depend on the border

_NONE = Memory(0, 0, 0, 0)


def splice(program: Program, units: Sequence[str], made: int, wanted: int) -> Program | None:
    """Return the program in which backward computes other numbers of equal units again.

    Arguments:
        program: the program in which it computes the first ``made`` of the units again.
        units: names of the equal units, in the order of forward.
        made: number of units that ``program`` computes again.
        wanted: number of units that the result computes again.

    Returns:
        The program; ``None`` if a border is within ``MARGIN`` units of another one, or if the steps
        of a unit are not one piece in forward and one in backward.
    """
    if min(made, wanted, len(units) - made, len(units) - wanted) <= MARGIN:
        return None
    source = {name: units[_source(i, made, wanted)] for i, name in enumerate(units)}
    parts = list(_parts(program.steps))
    positions_of: dict[str, list[int]] = {name: [] for name in units}
    for i, (name, _, _) in enumerate(parts):
        if name in positions_of:
            positions_of[name].append(i)
    if any(len(places) != 2 for places in positions_of.values()):
        return None
    steps: list[Run | Mark] = []
    memory_now = _NONE
    for i, part in enumerate(parts):
        name, begin, taken = part
        if name in positions_of and source[name] != name:
            _, begin, taken = parts[positions_of[source[name]][positions_of[name].index(i)]]
        more_memory = Memory(
            *(byte_change - there for byte_change, there in zip(memory_now, begin, strict=True))
        )
        taken = (
            [_moved(step, name, more_memory) for step in taken]
            if any(more_memory) or taken is not part[2]
            else taken
        )
        steps += taken
        memory_now = next(
            (step.end for step in reversed(taken) if isinstance(step, Run)), memory_now
        )
    spared = {name for name in program.not_saved if name not in positions_of} | {
        name for name in units if source[name] in program.not_saved
    }
    saved_bytes = {
        name: program.saved.get(source.get(name, name)) for name in (*program.saved, *units)
    }
    saved = {name: size for name, size in saved_bytes.items() if size is not None}
    return Program(tuple(steps), program.order, program.backward, frozenset(spared), saved)


def in_pieces(program: Program, units: Sequence[str]) -> bool:
    """Return whether each unit's steps are one piece in forward and one in backward."""
    places = Counter(name for name, _, _ in _parts(program.steps))
    return all(places[name] == 2 for name in units)


def _source(position: int, made: int, wanted: int) -> int:
    """Return the position of the unit whose steps a unit takes."""
    if abs(2 * (position - wanted) + 1) <= 2 * MARGIN:
        return position - wanted + made  # near the border
    if position < wanted:
        return min(position, made - 1 - MARGIN) if position > MARGIN else position
    return max(position, made + MARGIN)


def _parts(steps: Sequence[Run | Mark]) -> Iterator[tuple[str, Memory, list[Run | Mark]]]:
    """Yield the steps unit by unit, with the memory before each."""
    begin = _NONE
    for name, group in itertools.groupby(steps, key=lambda step: step.unit):
        group_steps = list(group)
        yield name, begin, group_steps
        begin = next((step.end for step in reversed(group_steps) if isinstance(step, Run)), begin)


def _moved(step: Run | Mark, name: str, more: Memory) -> Run | Mark:
    """Return a step of another unit, with some more memory all the time."""
    if isinstance(step, Mark):
        return Mark(step.what, name)
    highest, end = (Memory(*map(int.__add__, memory, more)) for memory in (step.highest, step.end))
    return Run(name, step.what, step.work, highest, end)
