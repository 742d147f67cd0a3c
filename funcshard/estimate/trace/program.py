"""``Program``: a tape as the units of a plan see it. ``splice`` recomputes other units.

A ``Run`` is the time between two moments at which the runtime of a plan acts, such as the call of a
unit. The runtime gathers and frees nothing inside a run, so its highest memory is enough. A program
depends on which modules are units, not on meshes, strategies, schedules and hardware.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from funcshard._utils import tree
from funcshard.estimate.trace.needs import Needs, Owners
from funcshard.estimate.trace.stretches import Counts, Stretch, add_operation, compact
from funcshard.estimate.trace.tape import (
    ACTIVATION,
    GRADIENT,
    LOSS,
    Alloc,
    Ask,
    At,
    Enter,
    Event,
    Exit,
    Free,
    Grad,
    Op,
    Tape,
    UseParam,
    categories_of,
)
from funcshard.plan import Plan, Reached, UnitPlan

MARGIN = 3  # units on each side of a border whose steps may depend on the border


class Memory(NamedTuple):
    """Bytes of the tape's storages by category."""

    activations: int
    temporaries: int
    loss: int
    gradients: int

    @property
    def total(self) -> int:
        return sum(self)


class Work(NamedTuple):
    """Operations of one dtype: FLOPs, bytes moved, and number of kernels.

    Those with and without FLOPs are apart, because a kernel takes the longer of its two times.
    """

    dtype: str
    flops: int
    bytes: int
    kernels: int


@dataclass(frozen=True, slots=True)
class Run:
    """The computation between two places at which the runtime acts, for one unit.

    Attributes:
        unit: the unit; the root for modules in no other unit.
        what: ``"forward"``, ``"loss"`` or ``"backward"``, with the forwards that a checkpoint runs
            again.
        work: the operations, by dtype and by whether they have FLOPs.
        highest: the memory at its highest.
        end: the memory at the end.
    """

    unit: str
    what: str
    work: tuple[Work, ...]
    highest: Memory
    end: Memory


@dataclass(frozen=True, slots=True)
class Program:
    """The runs of one forward and backward, and the places between them, in order.

    Attributes:
        steps: the runs and places; ``"return"`` is the end of a unit's forward, ``"free"`` of one
            that runs again.
        order: names of the units as forward calls them.
        backward: the order that the runtime learns, as in ``Schedule.backward``.
        not_saved: units whose backward needs none of their parameters.
        saved: bytes that each unit keeps for backward.
        reached: the places of backward, for ``predict_step``.
    """

    steps: tuple[Run | Reached, ...]
    order: tuple[str, ...]
    backward: tuple[tuple[str, str], ...]
    not_saved: frozenset[str]
    saved: Mapping[str, int]
    reached: tuple[Reached, ...] = field(init=False, compare=False)

    def runs(self) -> Iterator[Run]:
        return (step for step in self.steps if isinstance(step, Run))

    def __post_init__(self) -> None:
        # Why here: many plans share a program.
        reached = tuple(
            step
            for step in self.steps
            if isinstance(step, Reached) and step.what in ("need", "again", "reduce", "leave")
        )
        object.__setattr__(self, "reached", reached)


def make_program(
    tape: Tape, paths: Mapping[str, Sequence[str]], *, stays: Collection[str] = ()
) -> Program:
    """Return the program of a tape for the units of a plan.

    Arguments:
        tape: the tape of forward and backward.
        paths: the paths of each unit, by its name.
        stays: units that stay gathered after forward. They matter to nested units inside a
            checkpoint.
    """
    units = Owners(paths)
    return _Builder(
        list(compact(tape, units.of_path)), units, frozenset(paths).difference(stays)
    ).program()


class _Builder:
    def __init__(
        self, events: list[Event | Stretch], units: Owners, resharded: Collection[str]
    ) -> None:
        self.events = events
        self.units = units
        self.needs = Needs(units, resharded)
        self.steps: list[Run | Reached] = []
        self.live: dict[int, tuple[int, int]] = {}  # by storage: category, bytes
        self.memory = [0, 0, 0, 0]
        self.total = 0
        # Units to reduce, with the storages of their gradients, and bytes of those in stretches.
        self.complete: list[tuple[str, list[int], int]] = []
        self.work: Counts = {}
        self.works: dict[tuple[Work, ...], tuple[Work, ...]] = {}  # equal works are one object
        self.highest: tuple[int, Memory] | None = None
        self.unit, self.what = "", "forward"
        self.ungraded: frozenset[str] = frozenset()  # units without gradients, such as frozen ones
        self.lent: list[str] = []  # those of them that backward uses now

    def program(self) -> Program:
        categories = categories_of(self.events)
        units, needs = self.units, self.needs
        # Gradients that each call of a unit still awaits.
        awaited_grads = Counter[tuple[str, int]]()
        for event in self.events:
            # Note: a call of a unit is done when all of its gradients are complete, so count them
            # first.
            if isinstance(event, Grad):
                awaited_grads[units.of_param(event.path), event.call] += 1
            elif isinstance(event, Stretch):
                for below, call, count, _ in event.grads:
                    awaited_grads[units.owner(below), call] += count
        # Note: no gradient ever says that backward is done with these units.
        self.ungraded = frozenset(units.members).difference(unit for unit, _ in awaited_grads)
        forward_order, path = [""], ""
        entered_counts, saved_bytes = Counter[str](), Counter[str]()
        grad_storages: defaultdict[str, list[int]] = defaultdict(list)
        added_bytes = Counter[str]()  # bytes of gradients in stretches
        in_backward = backward_began = False
        self._mark("forward", "")
        needs.call("")
        for position, event in enumerate(self.events):
            if isinstance(event, Alloc):
                category = categories[position]
                self.live[event.storage] = category, event.bytes
                self.memory[category] += event.bytes
                self.total += event.bytes
                # Note: a forward that a checkpoint runs again also makes activations, in backward.
                if category == ACTIVATION and not in_backward:
                    saved_bytes[self.unit] += event.bytes
                if self.highest is None or self.total > self.highest[0]:
                    self.highest = self.total, Memory(*self.memory)
            elif isinstance(event, Free):
                # Note: a gradient is freed when its unit is reduced.
                if self.live.get(event.storage, (GRADIENT, 0))[0] != GRADIENT:
                    self._free(event.storage)
            elif isinstance(event, Stretch):
                self._add(event)
                if event.saved and not in_backward:
                    saved_bytes[self.unit] += event.saved
                for below, call, count, size in event.grads:
                    unit = units.owner(below)
                    awaited_grads[unit, call] -= count
                    added_bytes[unit] += size
            elif isinstance(event, Op):
                add_operation(self.work, event)
            elif isinstance(event, At):
                path, phase = event
                # Note: backward comes to another module, so it may have left units for good.
                if self.complete:
                    self._reduce_complete(path)
                if self.lent:
                    self._leave(path)
                if phase == "backward" and not in_backward:
                    in_backward = True
                    # Note: the root's forward ends where backward begins, after the loss.
                    self._mark("return", "")
                # Note: backward of the loss still belongs to the loss, before the model's own
                # backward.
                run_phase = "loss" if path == LOSS else phase
                if in_backward and path != LOSS and not backward_began:
                    backward_began = True
                    self._mark("backward", "")
                if (units.owner(path), run_phase) != (self.unit, self.what):
                    self._flush()
                    self.unit, self.what = units.owner(path), run_phase
            elif isinstance(event, (Enter, Exit)):
                unit = units.of_path.get(event.path, "")
                if in_backward:
                    enters = isinstance(event, Enter)
                    # Note: in backward only a checkpoint calls modules.
                    self._marks(needs.enter_again(unit) if enters else needs.exit_again())
                    continue
                # Note: a group is called with its first member, and returns with its last one.
                is_whole = unit != "" and entered_counts[unit] % len(units.members[unit]) == 0
                if isinstance(event, Exit):
                    if is_whole:
                        self._mark("return", unit)
                    continue
                needs.enter(event.path, held=event.held)
                entered_counts[unit] += 1
                if is_whole:
                    self._mark("forward", unit)
                    forward_order.append(unit)
                    needs.call(unit)
            elif isinstance(event, UseParam):
                unit = units.of_param(event.path)
                if in_backward:
                    self._marks(needs.use(unit, path))
                else:
                    needs.save(unit, path)
            elif isinstance(event, Ask):
                self._marks(needs.ask(event.path))
            elif isinstance(event, Grad):
                unit = units.of_param(event.path)
                # Note: a gradient that autograd only passes on has no storage of its own.
                if event.storage in self.live:
                    grad_storages[unit].append(event.storage)
                awaited_grads[unit, event.call] -= 1
                if awaited_grads[unit, event.call] == 0:
                    self.complete.append(
                        (unit, grad_storages.pop(unit, []), added_bytes.pop(unit, 0))
                    )
                    if event.call:  # autograd has reached the node that reduces
                        self._reduce_complete(None)
        self._reduce_complete(None)
        self._flush()
        self._leave_root()
        not_saved = frozenset(units.members) - needs.used
        order = tuple(forward_order)
        return Program(tuple(self.steps), order, needs.order(), not_saved, dict(saved_bytes))

    def _reduce_complete(self, path: str | None) -> None:
        """Reduce units with complete gradients, unless they contain the module at ``path``."""
        units_inside: set[str | None] = set()
        if path is not None:
            units_inside.update(map(self.units.of_path.get, tree.upwards(path)))
        complete_units = self.complete
        self.complete = [complete for complete in complete_units if complete[0] in units_inside]
        units_outside = [complete for complete in complete_units if complete[0] not in units_inside]
        # Note: autograd runs nodes in the opposite order of forward, and a unit's reducing node was
        # made when forward called the unit.
        units_outside.sort(key=lambda complete: -self.needs.position(complete[0]))
        for unit, storages, size in units_outside:
            self._mark("reduce", unit)
            self.needs.reduce(unit)
            for storage in storages:
                self._free(storage)
            self.memory[GRADIENT] -= size
            self.total -= size
            current_memory = Memory(*self.memory)
            # Note: a run without work, so that the simulator sees the memory after the frees.
            self.steps.append(Run(self.unit, self.what, (), current_memory, current_memory))

    def _leave(self, path: str) -> None:
        """Leave units without gradients that don't contain the module at ``path``."""
        units_inside = set(map(self.units.of_path.get, tree.upwards(path)))
        for unit in [lent_unit for lent_unit in self.lent if lent_unit not in units_inside]:
            self.lent.remove(unit)
            self._mark("leave", unit)
            self.needs.leave(unit)

    def _leave_root(self) -> None:
        """Leave the root after its last computation, if it has no gradients."""
        if "" not in self.lent:
            return
        # Why here: backward never leaves the root, so its end is known only now.
        last_run = max(
            i for i, step in enumerate(self.steps) if isinstance(step, Run) and not step.unit
        )
        need_place = self.steps.index(Reached("need", ""))
        self.steps.insert(max(last_run, need_place) + 1, Reached("leave", ""))

    def _add(self, stretch: Stretch) -> None:
        for key, counts in stretch.work:
            work = self.work.setdefault(key, [0, 0, 0])
            for i, count in enumerate(counts):
                work[i] += count
        if stretch.highest is not None:
            most_bytes = self.total + sum(stretch.highest)
            if self.highest is None or most_bytes > self.highest[0]:
                self.highest = most_bytes, Memory(*map(operator.add, self.memory, stretch.highest))
        for category, size in enumerate(stretch.end):
            self.memory[category] += size
            self.total += size

    def _free(self, storage: int) -> None:
        freed_storage = self.live.pop(storage, None)
        if freed_storage is not None:
            category, size = freed_storage
            self.memory[category] -= size
            self.total -= size

    def _flush(self) -> None:
        if self.work or self.highest is not None:
            current_memory = Memory(*self.memory)
            highest_memory = current_memory
            if self.highest is not None and self.highest[0] > self.total:
                highest_memory = self.highest[1]
            run_work = tuple([Work(dtype, *counts) for (dtype, _), counts in self.work.items()])
            # Note: equal works are one object, because lanes look up the cost of a run by its
            # identity.
            run_work = self.works.setdefault(run_work, run_work)
            self.steps.append(Run(self.unit, self.what, run_work, highest_memory, current_memory))
        self.work, self.highest = {}, None

    def _marks(self, marks: Iterable[tuple[str, str]]) -> None:
        for mark_kind, unit in marks:
            self._mark(mark_kind, unit)
            if mark_kind == "need" and unit in self.ungraded:
                self.lent.append(unit)

    def _mark(self, what: str, unit: str) -> None:
        self._flush()
        self.steps.append(Reached(what, unit))


# --- other units recomputed -----------------------------------------------------------------------

# A search recomputes the first 10, 20 or 30 of many equal units. One trace has all the steps of
# such programs: those of equal units differ in names, and in the memory that was there before.

_NONE = Memory(0, 0, 0, 0)


def equal_units(plan: Plan, program: Program) -> list[list[UnitPlan]]:
    """Return the units of a plan in groups of equal ones, each in the order of forward."""
    forward_flops = Counter[str]()
    for run in program.runs():
        if run.what == "forward":
            forward_flops[run.unit] += sum(work.flops for work in run.work)
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


def merge(
    none: Program, all_units: Program, border: Program, units: Sequence[str], made: int, wanted: int
) -> Program | None:
    """Return the program in which backward recomputes another number of similar units.

    Units may differ, as layers with other masks do. Each takes its own steps of a program that
    recomputes it, or doesn't. A border changes the steps beside it as another border does.

    Arguments:
        none: the program that recomputes none of the units.
        all_units: the program that recomputes all of them.
        border: the program that recomputes the first ``made`` of them.
        units: names of the units, in the order of forward.
        made: number of units that ``border`` recomputes.
        wanted: number of units that the result recomputes.

    Returns:
        The program; ``None`` if the steps of a unit are not one piece in forward and one in
        backward, or if a border reaches further than ``MARGIN``.
    """
    programs = (none, all_units, border)
    if any(
        (program.order, program.backward) != (none.order, none.backward) for program in programs
    ):
        return None
    none_parts, all_parts, border_parts = (list(_parts(program.steps)) for program in programs)
    names = [name for name, _, _ in none_parts]
    positions = {name: i for i, name in enumerate(units)}
    if any([name for name, _, _ in parts] != names for parts in (all_parts, border_parts)):
        return None
    if any(names.count(name) != 2 for name in units):
        return None

    def plain(part_index: int, count: int) -> tuple[Any, ...]:
        """Return the steps of a part far from any border, if ``count`` units are recomputed."""
        parts = all_parts if positions[names[part_index]] < count else none_parts
        return _piece(parts[part_index])

    # By whether it is in forward, and the distance from the border: what the border changes.
    changes: dict[tuple[bool, int], list[tuple[Memory, Memory]]] = {}
    for i, name in enumerate(names):
        if name in positions and (piece := _piece(border_parts[i])) != (usual := plain(i, made)):
            if [_kind(step) for step in piece] != [_kind(step) for step in usual]:
                return None
            place = names.index(name) == i, positions[name] - made
            changes[place] = [
                (_less(step.highest, old.highest), _less(step.end, old.end))
                for step, old in zip(piece, usual, strict=True)
                if isinstance(step, Run) and isinstance(old, Run)
            ]
    reach = max((max(-distance, distance + 1) for _, distance in changes), default=0)
    if not reach <= min(wanted, len(units) - wanted, MARGIN):
        return None
    steps: list[Run | Reached] = []
    memory_now = _NONE
    for i, name in enumerate(names):
        piece = _piece(border_parts[i], name)
        if name in positions:
            piece = tuple(_moved(step, name, _NONE) for step in plain(i, wanted))
            place = names.index(name) == i, positions[name] - wanted
            if place in changes:
                source_index = [
                    j for j, other in enumerate(names) if other == units[made + place[1]]
                ]
                source_piece = plain(source_index[not place[0]], made)
                changed_piece = _changed(piece, source_piece, changes[place])
                if changed_piece is None:
                    return None
                piece = changed_piece
        moved_steps = [_moved(step, step.unit, memory_now) for step in piece]
        steps += moved_steps
        memory_now = _end(moved_steps, memory_now)
    # Note: all that forward makes is freed, so a wrong border would show at the end.
    if memory_now != _end(none.steps, _NONE):
        return None
    recomputed_units = set(units[:wanted])
    sources = {name: all_units if name in recomputed_units else none for name in units}
    not_saved = border.not_saved.difference(units).union(
        name for name, program in sources.items() if name in program.not_saved
    )
    saved = {name: size for name, size in border.saved.items() if name not in positions}
    for name in units:
        # Note: what the unit before a border makes may be kept by no unit.
        ends = changes.get((True, positions[name] - wanted), ())
        size = sources[name].saved.get(name, 0) + sum(end.activations for _, end in ends[-1:])
        if size:
            saved[name] = size
    return Program(tuple(steps), none.order, none.backward, not_saved, saved)


def _kind(step: Run | Reached) -> Any:
    return (step.what, step.work) if isinstance(step, Run) else step.what


def _less(memory: Memory, less: Memory) -> Memory:
    return Memory(*map(operator.sub, memory, less))


def _changed(
    piece: Sequence[Run | Reached],
    source_piece: Sequence[Run | Reached],
    changes: Sequence[tuple[Memory, Memory]],
) -> tuple[Run | Reached, ...] | None:
    """Return the steps of a unit beside a border, by what one changes in those of another."""
    runs, source_runs = ([s for s in part if isinstance(s, Run)] for part in (piece, source_piece))
    # Note: memory that is there all the time adds to any steps, other memory to equal ones only.
    is_constant = len({memory for change in changes for memory in change}) == 1
    is_equal = [(r.highest, r.end) for r in runs] == [(r.highest, r.end) for r in source_runs]
    if len(runs) != len(changes) or not (is_constant or is_equal):
        return None
    more = iter(changes)
    return tuple(
        step
        if isinstance(step, Reached)
        else Run(
            step.unit,
            step.what,
            step.work,
            *(
                Memory(*map(operator.add, memory, added))
                for memory, added in zip((step.highest, step.end), next(more), strict=True)
            ),
        )
        for step in piece
    )


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


def _piece(part: tuple[str, Memory, list[Run | Reached]], name: str = "") -> tuple[Any, ...]:
    """Return the steps of a unit under another name, without the memory before them."""
    _, memory_begin, steps = part
    less_memory = Memory(*map(operator.neg, memory_begin))
    return tuple(_moved(step, name, less_memory) for step in steps)


def _end(steps: Sequence[Run | Reached], memory: Memory) -> Memory:
    return next((step.end for step in reversed(steps) if isinstance(step, Run)), memory)


def _moved(step: Run | Reached, name: str, more: Memory) -> Run | Reached:
    """Return another unit's step, with some more memory all the time."""
    if isinstance(step, Reached):
        return Reached(step.what, name)
    highest, end = (Memory(*map(operator.add, memory, more)) for memory in (step.highest, step.end))
    return Run(name, step.what, step.work, highest, end)
