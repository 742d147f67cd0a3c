"""``Tape``: the memory and the operations of one forward and backward, in order, as data.

The tracer writes a tape once. Everything else reads it: which unit an operation belongs to depends
on the plan, and a tape only says in which module it ran.

Storages have numbers. A tape of a model with many equal modules holds the events of one of them in
a ``Fold``, and a ``Call`` represents the events of each one. Inside a fold, the numbers of storages
that it exchanges with its caller are negative; see ``Call``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

LOSS = "(loss)"  # stands for the path of the code that computes the loss


class At(NamedTuple):
    """The events that follow belong to a module: ``""`` is the root of the tape or fold."""

    path: str
    phase: str


class Enter(NamedTuple):
    """A module's forward begins, with storages of its inputs.

    ``held``: a checkpoint runs it in forward, and no other module is between the two.
    """

    path: str
    inputs: tuple[int, ...]
    held: bool = False


class Exit(NamedTuple):
    """A module's forward ends, with storages of its outputs."""

    path: str
    outputs: tuple[int, ...]


class Alloc(NamedTuple):
    """A storage comes into being."""

    storage: int
    bytes: int


class Free(NamedTuple):
    """Nothing refers to a storage any more."""

    storage: int


class Op(NamedTuple):
    """An operation that reads or writes memory: one kernel."""

    flops: int
    bytes: int
    dtype: str


class Save(NamedTuple):
    """Autograd saves a tensor in a storage for backward."""

    storage: int
    dtype: str


class UseParam(NamedTuple):
    """Autograd saves a parameter, so backward needs it; by its name.

    In backward: backward uses it, or a forward that a checkpoint runs again does.
    """

    name: str


class Ask(NamedTuple):
    """Backward of a module asks a checkpoint for a tensor."""

    path: str


class Grad(NamedTuple):
    """The gradient of a parameter is complete, in a storage.

    ``call``: number of the call whose gradient it is, for modules whose calls are traced apart.
    """

    name: str
    storage: int
    call: int = 0


class Call(NamedTuple):
    """A folded module runs: the events of the fold's phase happen here.

    Attributes:
        fold: index of the fold.
        path: path of the module, in place of the fold's own.
        phase: the part of the fold that runs: ``"forward"``, ``"backward"``, or ``"recompute"`` for
            a forward that a checkpoint around several modules runs again.
        instance: number of the forward call; its backward has the same.
        exchanged: number inside the fold and number here of each storage that both sides know, such
            as that of an output.
        freed: numbers inside the fold of those that are freed here. The module that was traced may
            share a storage with other modules, of which the last one frees it.
    """

    fold: int
    path: str
    phase: str
    instance: int
    exchanged: tuple[tuple[int, int], ...]
    freed: tuple[int, ...]


Event = At | Enter | Exit | Alloc | Free | Op | Save | UseParam | Ask | Grad | Call


@dataclass(frozen=True, slots=True)
class Fold:
    """The events of one module, which represents all modules of its kind.

    Attributes:
        path: path of the module that was traced.
        parts: the events of each phase (see ``Call``). Paths and names start below the module.
    """

    path: str
    parts: Mapping[str, tuple[Event, ...]]


@dataclass(frozen=True, slots=True)
class Tape:
    """The events of one forward and backward.

    Attributes:
        events: the events in order.
        folds: the folds that calls refer to, by index.
    """

    events: tuple[Event, ...]
    folds: tuple[Fold, ...] = ()

    def expanded(self) -> Iterator[Event]:
        """Yield all events, those of folds in place of the calls."""
        numbers = itertools.count(1 << 40)  # far above the numbers of the tape
        calls: dict[int, _Instance] = {}
        for event in self.events:
            if isinstance(event, Call):
                yield from self._call(event, "", _outside, calls, numbers)
            else:
                yield event

    def expanded_calls(self, calls: Iterable[Call]) -> Iterator[list[Event]]:
        """Yield the events of each of some calls that are in no fold."""
        numbers = itertools.count(1 << 40)
        known_instances: dict[int, _Instance] = {}
        for call in calls:
            yield list(self._call(call, "", _outside, known_instances, numbers))

    def forward_flops(self) -> Mapping[str, int]:
        """Return the floating-point operations of forward by dtype, without those of the loss."""
        return _forward_flops(
            self.events, [fold.parts.get("forward", ()) for fold in self.folds], {}
        )

    def repeated(self) -> frozenset[str]:
        """Return the paths of modules that one forward calls several times."""
        return frozenset(
            _repeated(self.events, [fold.parts.get("forward", ()) for fold in self.folds], {})
        )

    def _call(
        self,
        call: Call,
        prefix: str,
        outer: Callable[[int], int],
        calls: dict[int, _Instance],
        numbers: Iterator[int],
    ) -> Iterator[Event]:
        call_instance = calls.setdefault(call.instance, _Instance({}, {}))
        call_instance.storages.update(
            (inside, outer(outside)) for inside, outside in call.exchanged
        )
        path = joined(prefix, call.path)
        known_numbers = call_instance.storages

        def number(storage: int) -> int:
            storage_number = known_numbers.get(storage)
            if storage_number is None:
                storage_number = known_numbers[storage] = next(numbers)
            return storage_number

        for event in self.folds[call.fold].parts.get(call.phase, ()):
            if isinstance(event, Op):
                yield event
            elif isinstance(event, Alloc):
                if event.storage > 0 or event.storage in known_numbers:
                    yield Alloc(number(event.storage), event.bytes)
            elif isinstance(event, Free):
                if event.storage in known_numbers and (
                    event.storage > 0 or event.storage in call.freed
                ):
                    yield Free(known_numbers[event.storage])
            elif isinstance(event, At):
                yield At(joined(path, event.path), event.phase)
            elif isinstance(event, Call):
                yield from self._call(event, path, number, call_instance.calls, numbers)
            elif isinstance(event, Enter):
                yield Enter(joined(path, event.path), tuple(map(number, event.inputs)), event.held)
            elif isinstance(event, Exit):
                yield Exit(joined(path, event.path), tuple(map(number, event.outputs)))
            elif isinstance(event, Grad):
                yield Grad(joined(path, event.name), number(event.storage), event.call)
            elif isinstance(event, Ask):
                yield Ask(joined(path, event.path))
            elif isinstance(event, Save):
                yield Save(number(event.storage), event.dtype)
            else:
                yield UseParam(joined(path, event.name))


def _forward_flops(
    events: tuple[Event, ...], forwards: list[tuple[Event, ...]], known: dict[int, Counter[str]]
) -> Counter[str]:
    flops_by_path, counts = Counter[str](), True
    for event in events:
        if isinstance(event, At):
            counts = event.phase == "forward" and event.path != LOSS
        elif isinstance(event, Op):
            if counts and event.flops:
                flops_by_path[event.dtype] += event.flops
        elif isinstance(event, Call) and event.phase == "forward":
            if event.fold not in known:
                known[event.fold] = _forward_flops(forwards[event.fold], forwards, known)
            flops_by_path.update(known[event.fold])
    return flops_by_path


def _repeated(
    events: tuple[Event, ...], forwards: list[tuple[Event, ...]], known: dict[int, set[str]]
) -> set[str]:
    counts, calls = Counter[str](), dict[str, int]()
    for event in events:
        if isinstance(event, At) and event.phase != "forward":
            break
        if isinstance(event, (Enter, Call)):
            counts[event.path] += 1
        if isinstance(event, Call):
            calls[event.path] = event.fold
    repeated_paths = {path for path, count in counts.items() if count > 1}
    for path, fold in calls.items():
        if fold not in known:
            known[fold] = _repeated(forwards[fold], forwards, known)
        inside = known[fold] if path not in repeated_paths else _paths(forwards[fold], forwards)
        repeated_paths.update(joined(path, inner_path) for inner_path in inside)
    return repeated_paths


def _paths(events: tuple[Event, ...], forwards: list[tuple[Event, ...]]) -> Iterator[str]:
    for event in events:
        if isinstance(event, (Enter, Call)):
            yield event.path
        if isinstance(event, Call):
            yield from (
                joined(event.path, inner_path)
                for inner_path in _paths(forwards[event.fold], forwards)
            )


@dataclass(slots=True)
class _Instance:
    """One call of a fold: its storages by their number inside, and the calls inside it."""

    storages: dict[int, int]
    calls: dict[int, _Instance]


def _outside(storage: int) -> int:
    return storage


def joined(prefix: str, path: str) -> str:
    """Return the path of a module below another one."""
    return f"{prefix}.{path}" if prefix and path else prefix or path
