"""``Program``: a tape as the units of a plan see it. ``merge`` recomputes other units.

A ``Run`` is the time between two moments at which the runtime of a plan acts, such as the call of a
unit. The runtime gathers and frees nothing inside a run, so its highest memory is enough. A program
depends on which modules are units, not on meshes, strategies, schedules and hardware.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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

Piece = tuple[tuple[Any, ...], tuple[int, ...]]  # see ``_pieces``

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
            if isinstance(step, Reached)
            and step.what in ("need", "again", "reduce", "leave")
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
        self.works: dict[
            tuple[Work, ...], tuple[Work, ...]
        ] = {}  # equal works are one object
        self.highest: tuple[int, Memory] | None = None
        self.unit, self.what = "", "forward"
        self.ungraded: frozenset[str] = (
            frozenset()
        )  # units without gradients, such as frozen ones
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
        self.ungraded = frozenset(units.members).difference(
            unit for unit, _ in awaited_grads
        )
        forward_order, path = list[str](), ""
        entered_counts, saved_bytes = Counter[str](), Counter[str]()
        grad_storages: defaultdict[str, list[int]] = defaultdict(list)
        added_bytes = Counter[str]()  # bytes of gradients in stretches
        in_backward = backward_began = False

        def begin_unit(unit: str) -> None:
            self._mark("forward", unit)
            forward_order.append(unit)
            needs.call(unit)

        begin_unit("")
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
                is_whole = (
                    unit != "" and entered_counts[unit] % len(units.members[unit]) == 0
                )
                if isinstance(event, Exit):
                    if is_whole:
                        self._mark("return", unit)
                    continue
                needs.enter(event.path, held=event.held)
                entered_counts[unit] += 1
                if is_whole:
                    begin_unit(unit)
            elif isinstance(event, UseParam):
                unit = units.of_param(event.path)
                if in_backward:
                    self._marks(needs.use(unit, path))
                    continue
                # Note: a method of ``fully_shard(methods=...)`` calls the unit, and the trace knows
                # calls of modules only.
                if needs.position(unit) < 0:
                    begin_unit(unit)
                    self._mark("return", unit)
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
        return Program(
            tuple(self.steps), order, needs.order(), not_saved, dict(saved_bytes)
        )

    def _reduce_complete(self, path: str | None) -> None:
        """Reduce units with complete gradients, unless they contain the module at ``path``."""
        units_inside: set[str | None] = set()
        if path is not None:
            units_inside.update(map(self.units.of_path.get, tree.upwards(path)))
        complete_units = self.complete
        self.complete = [
            complete for complete in complete_units if complete[0] in units_inside
        ]
        units_outside = [
            complete for complete in complete_units if complete[0] not in units_inside
        ]
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
            i
            for i, step in enumerate(self.steps)
            if isinstance(step, Run) and not step.unit
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
                self.highest = (
                    most_bytes,
                    Memory(*map(operator.add, self.memory, stretch.highest)),
                )
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
            run_work = tuple(
                [Work(dtype, *counts) for (dtype, _), counts in self.work.items()]
            )
            # Note: equal works are one object, because lanes look up the cost of a run by its
            # identity.
            run_work = self.works.setdefault(run_work, run_work)
            self.steps.append(
                Run(self.unit, self.what, run_work, highest_memory, current_memory)
            )
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


def equal_units(plan: Plan, program: Program) -> list[list[UnitPlan]]:
    """Return the units of a plan in groups of equal ones, each in the order of forward."""
    forward_flops = Counter[str]()
    for run in program.runs():
        if run.what == "forward":
            forward_flops[run.unit] += sum(work.flops for work in run.work)
    units, unit_groups = plan.units, dict[Any, list[UnitPlan]]()
    for unit in (
        units[name] for name in dict.fromkeys((*program.order, *units)) if name in units
    ):
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


def merge(
    none: Program,
    all_units: Program,
    border: Program,
    units: Sequence[str],
    made: int,
    wanted: int,
) -> Program | None:
    """Return the program in which backward recomputes another number of similar units.

    Units may differ, as layers with other masks do. Each takes its own steps of a program that
    recomputes it, or doesn't. A border changes the steps beside it as another border does.

    Arguments:
        none: the program that recomputes none of the units. If it's ``border``, the units are
            equal, and take the steps of one that is ``MARGIN`` units from the border.
        all_units: the program that recomputes all of them, or ``border``.
        border: the program that recomputes the first ``made`` of them.
        units: names of the units, in the order of forward.
        made: number of units that ``border`` recomputes.
        wanted: number of units that the result recomputes.

    Returns:
        The program; ``None`` if the steps of a unit are not one piece in forward and one in
        backward, or if a border reaches further than ``MARGIN``.
    """
    positions = {name: i for i, name in enumerate(units)}
    programs = none, all_units, border
    piece_tables = none_pieces, all_pieces, border_pieces = tuple(map(_pieces, programs))
    forms = {
        (program.order, program.backward, *pieces)
        for program, pieces in zip(programs, piece_tables, strict=True)
    }
    if len(forms) > 1 or any(
        (name, 1) not in border_pieces or (name, 2) in border_pieces for name in units
    ):
        return None
    last_before, first_behind = len(units), 0
    if none is border:
        last_before, first_behind = made - 1 - MARGIN, made + MARGIN
        # Note: the first and last units have steps of their own kind too.
        for alike in (
            units[MARGIN : last_before + 1],
            units[first_behind : len(units) - MARGIN],
        ):
            if (
                len({(border_pieces[name, 0], border_pieces[name, 1]) for name in alike})
                > 1
            ):
                return None

    def source_of(
        name: str, count: int
    ) -> tuple[Program, dict[tuple[str, int], Piece], str]:
        """Return what has a unit's steps far from any border, if ``count`` units are recomputed."""
        if positions[name] < count:
            return all_units, all_pieces, units[min(positions[name], last_before)]
        return none, none_pieces, units[max(positions[name], first_behind)]

    def usual(name: str, phase: int, count: int) -> Piece:
        _, pieces, source_name = source_of(name, count)
        return pieces[source_name, phase]

    # By phase and distance from the border: the bytes that it adds, and those without it.
    changes: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for (name, phase), (kinds, sizes) in border_pieces.items():
        if name in positions:
            usual_kinds, usual_sizes = usual(name, phase, made)
            if kinds != usual_kinds:
                return None
            if sizes != usual_sizes:
                more_sizes = tuple(map(operator.sub, sizes, usual_sizes))
                changes[phase, positions[name] - made] = more_sizes, usual_sizes
    reach = max((max(-distance, distance + 1) for _, distance in changes), default=0)
    if not reach <= min(wanted, len(units) - wanted, MARGIN):
        return None
    merged_pieces = dict(border_pieces)
    for name, phase in border_pieces:
        if name in positions:
            kinds, sizes = usual(name, phase, wanted)
            if change := changes.get((phase, positions[name] - wanted)):
                more_sizes, sizes_before = change
                # Note: memory that is there all the time adds to any steps, other memory to equal
                # ones only.
                is_constant = more_sizes == more_sizes[:4] * (len(sizes) // 4)
                if not (is_constant or sizes == sizes_before):
                    return None
                sizes = tuple(map(operator.add, sizes, more_sizes))
            merged_pieces[name, phase] = kinds, sizes
    sources = {name: source_of(name, wanted) for name in units}
    not_saved = border.not_saved.difference(units).union(
        name
        for name, (program, _, source) in sources.items()
        if source in program.not_saved
    )
    saved = {name: size for name, size in border.saved.items() if name not in positions}
    for name, (program, _, source) in sources.items():
        # Note: what the unit before a border makes may be kept by no unit.
        more_sizes, _ = changes.get((0, positions[name] - wanted), ((0,) * 4, ()))
        if size := program.saved.get(source, 0) + more_sizes[-4]:
            saved[name] = size
    steps = tuple(_steps(merged_pieces))
    merged_program = Program(steps, border.order, border.backward, not_saved, saved)
    # Note: all that forward makes is freed, so a wrong border would show at the end.
    is_even = [*merged_program.runs()][-1].end == [*border.runs()][-1].end
    return merged_program if is_even else None


def similar_border(program: Program, names: Sequence[str], wanted: int) -> int:
    """Return the number of units nearest the half whose border lies between such units too."""
    pieces = _pieces(program)

    def around(count: int) -> list[Any]:
        return [
            pieces.get((name, i)) for name in names[count - 1 : count + 1] for i in range(2)
        ]

    counts = sorted(range(1, len(names)), key=lambda count: abs(count - len(names) // 2))
    return next((count for count in counts if around(count) == around(wanted)), wanted)


def _pieces(program: Program) -> dict[tuple[str, int], Piece]:
    """Return the steps of a unit in a row, by its name and how many such rows came before.

    A piece is what the steps do, and the bytes of the runs among them, less those before it.
    """
    pieces: dict[tuple[str, int], Piece] = {}
    piece_counts, memory_before = Counter[str](), Memory(0, 0, 0, 0)
    for name, unit_steps in itertools.groupby(program.steps, key=lambda step: step.unit):
        kinds: list[Any] = []
        sizes: list[int] = []
        memory_now = memory_before
        for step in unit_steps:
            if isinstance(step, Run):
                kinds.append((step.what, step.work))
                memory_now = step.end
                sizes += map(operator.sub, step.highest + memory_now, 2 * memory_before)
            else:
                kinds.append(step.what)
        pieces[name, piece_counts[name]] = tuple(kinds), tuple(sizes)
        piece_counts[name] += 1
        memory_before = memory_now
    return pieces


def _steps(pieces: Mapping[tuple[str, int], Piece]) -> Iterator[Run | Reached]:
    """Yield the steps of pieces; ``_pieces`` is the inverse."""
    memory_before = memory_now = Memory(0, 0, 0, 0)
    for (name, _), (kinds, sizes) in pieces.items():
        run_sizes = map(operator.add, sizes, itertools.cycle(memory_before))
        for kind in kinds:
            if isinstance(kind, str):
                yield Reached(kind, name)
            else:
                highest, memory_now = (
                    Memory(*itertools.islice(run_sizes, 4)) for _ in range(2)
                )
                what, work = kind
                yield Run(name, what, work, highest, memory_now)
        memory_before = memory_now
