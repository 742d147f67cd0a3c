"""``Program``: a tape as the units of a plan see it.

A tape says in which module memory comes and goes. A program says it by unit: a ``Run`` is the time
between two moments at which the runtime of a plan acts, such as the call of a unit. Inside a run
nothing is gathered or freed by the runtime, so a run needs only the moment of its highest memory.

Programs depend on which modules are units, and on which units are rematerialised. Meshes,
strategies, schedules and hardware do not matter, so one program serves a sweep over these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from funcshard.estimate.tape import LOSS, Alloc, At, Enter, Event, Exit, Free, Grad, Op, Save, Tape, UseParam

__all__ = ["Mark", "Memory", "Program", "Run", "Work", "make_program"]


class Memory(NamedTuple):
    """Bytes of the tape's storages by category."""

    activations: int
    temporaries: int
    loss: int
    gradients: int

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self)


class Work(NamedTuple):
    """Operations of one dtype: floating-point operations, bytes moved, and number of kernels."""

    dtype: str
    flops: int
    bytes: int
    kernels: int


class Mark(NamedTuple):
    """A moment at which the runtime acts.

    Attributes:
        what: ``"forward"``: the unit is called; ``"return"``: its forward is over; ``"backward"``:
            the loss's backward is over; ``"need"``: backward needs the unit's leaves;
            ``"reduce"``: the unit's gradients are complete.
        unit: name of the unit; ``""`` for ``"backward"``.
    """

    what: str
    unit: str


@dataclass(frozen=True, slots=True)
class Run:
    """What runs between two marks, for one unit.

    Attributes:
        unit: the unit; the root for modules in no other unit.
        what: ``"forward"``, ``"loss"``, ``"recompute"`` or ``"backward"``.
        work: the operations, by dtype.
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
    """The runs and marks of one forward and backward, in order.

    Attributes:
        steps: the runs and marks.
        order: names of the units as forward calls them.
        backward: what backward reaches, as in ``Schedule.backward``.
        not_saved: units whose backward needs none of their parameters.
        saved: bytes that each unit keeps for backward, at the end of forward.
    """

    steps: tuple[Run | Mark, ...]
    order: tuple[str, ...]
    backward: tuple[tuple[str, str], ...]
    not_saved: frozenset[str]
    saved: Mapping[str, int]


def make_program(
    tape: Tape, paths: Mapping[str, Sequence[str]], *, remat: Iterable[str] = (), plain: Tape | None = None
) -> Program:
    """Return the program of a tape for the units of a plan.

    Arguments:
        tape: the tape of forward and backward.
        paths: the paths of each unit, by its name.
        remat: names of units that backward computes again.
        plain: the tape of a forward that saves nothing; needed for ``remat``.
    """
    events = list(tape.expanded())
    units = _Units(paths)
    again = frozenset(remat)
    if again:
        assert plain is not None, "remat needs the tape of a forward without gradients"
        events = list(_rematerialised(events, list(plain.expanded()), units, again))
    return _Builder(events, units).program()


class _Units:
    """Which unit a module belongs to."""

    def __init__(self, paths: Mapping[str, Sequence[str]]) -> None:
        self.of_path = {path: name for name, nodes in paths.items() for path in nodes}
        self.members = {name: frozenset(nodes) for name, nodes in paths.items()}
        self._cache: dict[str, str] = {"": "", LOSS: ""}

    def owner(self, path: str) -> str:
        """Return the innermost unit that contains a module; ``""`` if no unit but the root does."""
        found = self._cache.get(path)
        if found is None:
            own = self.of_path.get(path)
            found = own if own is not None else self.owner(path.rpartition(".")[0])
            self._cache[path] = found
        return found

    def within(self, path: str, names: frozenset[str]) -> str | None:
        """Return the outermost of the named units that contains a module, or ``None``."""
        found, node = None, path
        while node:
            name = self.of_path.get(node)
            found = name if name in names else found
            node = node.rpartition(".")[0]
        return found


class _Builder:
    def __init__(self, events: list[Event], units: _Units) -> None:
        self.events = events
        self.units = units
        self.steps: list[Run | Mark] = []
        self.live: dict[int, tuple[int, int]] = {}  # by storage: category, bytes
        self.memory = [0, 0, 0, 0]
        self.total = 0
        self.work: dict[str, list[int]] = {}
        self.highest: tuple[int, Memory] | None = None
        self.unit, self.what = "", "forward"

    def program(self) -> Program:
        """Return the program of the events."""
        categories = _categories(self.events)
        owners: dict[str, int] = {}  # number of gradients that each unit still awaits
        param_unit: dict[str, str] = {}
        for event in self.events:
            if isinstance(event, Grad):
                unit = param_unit.setdefault(event.name, self.units.owner(event.name.rpartition(".")[0]))
                owners[unit] = owners.get(unit, 0) + 1
        order: list[str] = []
        reached: list[tuple[str, str]] = []
        entered: dict[str, int] = {}
        inside: dict[str, int] = {}
        needed: set[str] = set()
        saving: set[str] = set()
        grads: dict[str, list[int]] = {}
        in_backward, began = False, False
        self._mark("forward", "")
        order.append("")
        saved: dict[str, int] = {}
        for position, event in enumerate(self.events):
            if isinstance(event, Alloc):
                category = categories[position]
                self.live[event.storage] = category, event.bytes
                self.memory[category] += event.bytes
                self.total += event.bytes
                if category == 0 and not in_backward:
                    saved[self.unit] = saved.get(self.unit, 0) + event.bytes
                if self.highest is None or self.total > self.highest[0]:
                    self.highest = self.total, Memory(*self.memory)
            elif isinstance(event, Free):
                found = self.live.get(event.storage)
                if found is not None and found[0] != _GRADIENT:
                    self._free(event.storage)
            elif isinstance(event, Op):
                work = self.work.setdefault(event.dtype, [0, 0, 0])
                work[0] += event.flops
                work[1] += event.bytes
                work[2] += 1
            elif isinstance(event, At):
                path, phase = event
                unit = self.units.owner(path)
                if phase == "backward" and not in_backward:
                    in_backward = True
                    self._mark("return", "")
                what = "loss" if path == LOSS else phase
                if in_backward and path != LOSS and not began:
                    began = True
                    self._mark("backward", "")
                if (unit, what) != (self.unit, self.what):
                    self._flush()
                    self.unit, self.what = unit, what
            elif isinstance(event, Enter):
                name = self.units.of_path.get(event.path, "") if event.path else ""
                if name and not in_backward:
                    inside[name] = inside.get(name, 0) + 1
                    members = len(self.units.members[name])
                    if members == 1 or entered.get(name, 0) % members == 0:
                        self._mark("forward", name)
                        order.append(name)
                    entered[name] = entered.get(name, 0) + 1
                elif name and name not in needed:
                    needed.add(name)
                    reached.append(("gather", name))
                    self._mark("need", name)
            elif isinstance(event, Exit):
                name = self.units.of_path.get(event.path, "") if event.path else ""
                if name and not in_backward:
                    members = len(self.units.members[name])
                    if members == 1 or entered[name] % members == 0:
                        self._mark("return", name)
            elif isinstance(event, UseParam):
                unit = param_unit.get(event.name) or param_unit.setdefault(
                    event.name, self.units.owner(event.name.rpartition(".")[0])
                )
                if not in_backward:
                    saving.add(unit)
                elif unit not in needed:
                    needed.add(unit)
                    reached.append(("gather", unit))
                    self._mark("need", unit)
            elif isinstance(event, Grad):
                unit = param_unit[event.name]
                found = self.live.get(event.storage)
                if found is not None:
                    grads.setdefault(unit, []).append(event.storage)
                owners[unit] -= 1
                if owners[unit] == 0:
                    reached.append(("reduce", unit))
                    self._mark("reduce", unit)
                    needed.discard(unit)
                    for storage in grads.pop(unit, ()):
                        self._free(storage)
                    now = Memory(*self.memory)
                    self.steps.append(Run(self.unit, self.what, (), now, now))
        self._flush()
        not_saved = frozenset(self.units.members) - saving - {name for what, name in reached if what == "gather"}
        return Program(tuple(self.steps), tuple(order), tuple(reached), not_saved, saved)

    def _free(self, storage: int) -> None:
        found = self.live.pop(storage, None)
        if found is not None:
            category, size = found
            self.memory[category] -= size
            self.total -= size

    def _flush(self) -> None:
        """End the current run."""
        if self.work or self.highest is not None:
            now = Memory(*self.memory)
            highest = now if self.highest is None or self.highest[0] <= self.total else self.highest[1]
            work = tuple(Work(dtype, *counts) for dtype, counts in self.work.items())
            self.steps.append(Run(self.unit, self.what, work, highest, now))
        self.work, self.highest = {}, None

    def _mark(self, what: str, unit: str) -> None:
        self._flush()
        self.steps.append(Mark(what, unit))


_ACTIVATION, _TEMPORARY, _LOSS, _GRADIENT = range(4)


def _categories(events: Sequence[Event]) -> dict[int, int]:
    """Return the category of each storage, by the position of the event that makes it."""
    made: dict[int, int] = {}
    found: dict[int, int] = {}
    backward: set[int] = set()
    path, phase = "", "forward"
    for position, event in enumerate(events):
        if isinstance(event, At):
            path, phase = event
        elif isinstance(event, Alloc):
            made[event.storage] = position
            found[position] = _LOSS if path == LOSS else _TEMPORARY
            if phase != "forward":
                backward.add(position)
        elif isinstance(event, Free):
            begin = made.get(event.storage)
            if begin is not None and found[begin] == _TEMPORARY and phase != "forward" and begin not in backward:
                found[begin] = _ACTIVATION
        elif isinstance(event, Save):
            begin = made.get(event.storage)
            if begin is not None and found[begin] == _TEMPORARY and phase == "recompute":
                found[begin] = _ACTIVATION
        elif isinstance(event, Grad):
            begin = made.get(event.storage)
            if begin is not None:
                found[begin] = _GRADIENT
    return found


def _rematerialised(events: list[Event], plain: list[Event], units: _Units, names: frozenset[str]) -> Iterator[Event]:
    """Yield the events of a step in which backward computes some units again.

    Forward runs such a unit as ``plain`` does, without saving. Before its backward come the events
    of its forward with saving, up to the last tensor that it saves.
    """
    without = _windows(plain, units, names)
    recorded: dict[str, list[list[Event]]] = {}
    fresh = 1 << 60
    stack: str | None = None  # the outermost such unit whose forward is being replaced
    calls: dict[str, int] = {}
    begun: set[str] = set()
    window: list[Event] = []
    at = At("", "forward")
    extra: dict[str, list[int]] = {}
    for event in events:
        if stack is not None:
            window.append(event)
            if isinstance(event, Exit) and units.of_path.get(event.path) == stack:
                name, stack = stack, None
                number = calls.get(name, 0)
                calls[name] = number + 1
                recorded.setdefault(name, []).append(window)
                replaced, fresh = _renamed(without[name][number], window, fresh)
                yield from replaced
                yield at
            continue
        if isinstance(event, Enter) and at.phase == "forward":
            called = units.of_path.get(event.path)
            if called in names and event.path:
                stack, window = called, [at, event]
                continue
        if isinstance(event, At):
            before, at = at, event
            if at.phase == "backward":
                inner = units.within(at.path, names)
                ended = units.within(before.path, names) if before.phase == "backward" else None
                if ended is not None and ended != inner:
                    yield from map(Free, extra.pop(ended, ()))
                if inner is not None and inner not in begun and recorded.get(inner):
                    begun.add(inner)
                    computed, fresh, left = _recomputation(recorded[inner].pop(), fresh)
                    extra[inner] = left
                    yield from computed
        yield event


def _windows(events: Sequence[Event], units: _Units, names: frozenset[str]) -> dict[str, list[list[Event]]]:
    """Return the events of each call of the named units, by unit."""
    found: dict[str, list[list[Event]]] = {}
    open_unit: str | None = None
    window: list[Event] = []
    at: Event = At("", "forward")
    for event in events:
        if isinstance(event, At):
            at = event
        if open_unit is None and isinstance(event, Enter) and units.of_path.get(event.path) in names and event.path:
            open_unit, window = units.of_path[event.path], [at]
        if open_unit is not None:
            window.append(event)
            if isinstance(event, Exit) and units.of_path.get(event.path) == open_unit:
                found.setdefault(open_unit, []).append(window)
                open_unit = None
    return found


def _renamed(window: list[Event], target: list[Event], fresh: int) -> tuple[list[Event], int]:
    """Return a window with new storages, except for those that ``target`` knows from outside."""
    numbers: dict[int, int] = {}
    for own, other in ((window, target), (window, target)):
        first, last = (next(e for e in each if isinstance(e, Enter)) for each in (own, other))
        numbers.update(zip(first.inputs, last.inputs, strict=False))
    ends = [next(e for e in reversed(each) if isinstance(e, Exit)) for each in (window, target)]
    numbers.update(zip(ends[0].outputs, ends[1].outputs, strict=False))
    found: list[Event] = []
    for event in window:
        if isinstance(event, (Alloc, Free)):
            if event.storage not in numbers:
                if isinstance(event, Free):
                    continue
                fresh += 1
                numbers[event.storage] = fresh
            found.append(event._replace(storage=numbers[event.storage]))
        elif isinstance(event, (At, Enter, Exit, Op)):
            found.append(event)
    return found, fresh


def _recomputation(window: list[Event], fresh: int) -> tuple[list[Event], int, list[int]]:
    """Return the events that compute a forward again, and the storages that they leave behind."""
    last = max((i for i, event in enumerate(window) if isinstance(event, (Save, UseParam))), default=-1)
    outputs = set(next(event for event in reversed(window) if isinstance(event, Exit)).outputs)
    saved = {event.storage for event in window[: last + 1] if isinstance(event, Save)}
    numbers: dict[int, int] = {}
    found: list[Event] = []
    made: dict[int, None] = {}
    for event in window[: last + 1]:
        if isinstance(event, At):
            found.append(At(event.path, "recompute"))
            continue
        if isinstance(event, (Alloc, Free, Save)) and event.storage in outputs:
            if event.storage not in numbers:
                fresh += 1
                numbers[event.storage] = fresh
            event = event._replace(storage=numbers[event.storage])
        if isinstance(event, Alloc):
            made[event.storage] = None
        elif isinstance(event, Free):
            made.pop(event.storage, None)
        found.append(event)
    found += [Free(storage) for storage in made if storage not in saved and storage not in numbers.values()]
    return found, fresh, [storage for storage in numbers.values() if storage in made]
