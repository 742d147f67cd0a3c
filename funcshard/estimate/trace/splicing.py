"""``splice``: the program of one remat set from that of another, for models of many equal units.

A search recomputes the first 10, 20 or 30 of many equal units. One trace has all the steps
of such programs: those of equal units differ in names, and in the memory that was there before.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from funcshard.estimate.trace.program import Memory, Program, Run
from funcshard.plan import Plan, Reached, UnitPlan

MARGIN = 3  # units on each side of a border whose steps may depend on the border

_NONE = Memory(0, 0, 0, 0)


def equal_units(plan: Plan, program: Program) -> list[list[UnitPlan]]:
    """Return the units of a plan in groups of equal ones, each in the order of forward."""
    forward_flops = Counter[str]()
    for step in program.steps:
        if isinstance(step, Run) and step.what == "forward":
            forward_flops[step.unit] += sum(work.flops for work in step.work)
    units, unit_groups = plan.units, dict[Any, list[UnitPlan]]()
    for unit in (units[name] for name in dict.fromkeys((*program.order, *units)) if name in units):
        buffer_forms = tuple(
            (buffer.key, buffer.numel, buffer.dtype, buffer.trainable, buffer.local)
            for buffer in unit.buffers
        )
        class_key = (
            not unit.name,
            not unit.members,
            buffer_forms,
            unit.precision,
            forward_flops[unit.name],
        )
        unit_groups.setdefault(class_key, []).append(unit)
    return list(unit_groups.values())


def splice(
    make_program: Callable[[], Program], units: Sequence[str], made: int, wanted: int
) -> Program | None:
    """Return the program in which backward recomputes another number of equal units.

    Arguments:
        make_program: returns the program that recomputes the first ``made`` of them.
        units: names of the equal units, in the order of forward.
        wanted: number of units that the result recomputes.

    Returns:
        The program; ``None`` if a border is within ``MARGIN`` units of another one, if the steps
        of a unit are not one piece in forward and one in backward, or if units differ in them.
    """
    # Note: the first and last units, and those beside a border, have steps of their own kind.
    if min(made, wanted, len(units) - made, len(units) - wanted) <= MARGIN:
        return None
    program = make_program()
    source_units = {name: units[_source(i, made, wanted)] for i, name in enumerate(units)}
    step_parts = list(_parts(program.steps))
    positions_of: dict[str, list[int]] = {name: [] for name in units}
    for i, (name, _, _) in enumerate(step_parts):
        if name in positions_of:
            positions_of[name].append(i)
    if any(len(positions) != 2 for positions in positions_of.values()):
        return None
    for equal_names in (units[MARGIN : made - MARGIN], units[made + MARGIN : len(units) - MARGIN]):
        pieces = {tuple(_piece(step_parts[i]) for i in positions_of[name]) for name in equal_names}
        if len(pieces) > 1:
            return None
    steps: list[Run | Reached] = []
    memory_now = _NONE
    for i, (name, memory_begin, unit_steps) in enumerate(step_parts):
        source_unit = source_units.get(name, name)
        if source_unit != name:
            piece_index = positions_of[name].index(i)  # 0 in forward, 1 in backward
            source_position = positions_of[source_unit][piece_index]
            _, memory_begin, unit_steps = step_parts[source_position]
        # Note: other units before this one were recomputed, so other memory is there.
        more_memory = Memory(*map(operator.sub, memory_now, memory_begin))
        if any(more_memory) or source_unit != name:
            unit_steps = [_moved(step, name, more_memory) for step in unit_steps]
        steps += unit_steps
        memory_now = _end(unit_steps, memory_now)
    sources = {name: source_units.get(name, name) for name in (*units, *program.not_saved)}
    not_saved = frozenset(name for name in sources if sources[name] in program.not_saved)
    saved = {name: size for name, size in program.saved.items() if name not in source_units}
    for name, source_unit in source_units.items():
        if source_unit in program.saved:
            saved[name] = program.saved[source_unit]
    return Program(tuple(steps), program.order, program.backward, not_saved, saved)


def _source(position: int, made: int, wanted: int) -> int:
    # Note: units beside the new border take the steps of those beside the old one.
    if abs(2 * (position - wanted) + 1) <= 2 * MARGIN:
        return position - wanted + made  # near the border
    if position <= MARGIN and position < wanted:
        return position
    if position < wanted:
        return min(position, made - 1 - MARGIN)
    return max(position, made + MARGIN)


def _parts(steps: Sequence[Run | Reached]) -> Iterator[tuple[str, Memory, list[Run | Reached]]]:
    memory_begin = _NONE
    for name, group in itertools.groupby(steps, key=lambda step: step.unit):
        group_steps = list(group)
        yield name, memory_begin, group_steps
        memory_begin = _end(group_steps, memory_begin)


def _piece(part: tuple[str, Memory, list[Run | Reached]]) -> tuple[Any, ...]:
    """Return the steps of a unit without its name and the memory before them."""
    _, memory_begin, steps = part
    less_memory = Memory(*map(operator.neg, memory_begin))
    return tuple(_moved(step, "", less_memory) for step in steps)


def _end(steps: Sequence[Run | Reached], memory: Memory) -> Memory:
    return next((step.end for step in reversed(steps) if isinstance(step, Run)), memory)


def _moved(step: Run | Reached, name: str, more: Memory) -> Run | Reached:
    """Return another unit's step, with some more memory all the time."""
    if isinstance(step, Reached):
        return Reached(step.what, name)
    highest, end = (Memory(*map(operator.add, memory, more)) for memory in (step.highest, step.end))
    return Run(name, step.what, step.work, highest, end)
