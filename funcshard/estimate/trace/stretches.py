"""``compact``: a tape in which most events of folded modules are added up, for the units of a plan.

A model of 58 equal blocks of 256 experts has a million events, of which those of one block are
enough. ``compact`` goes through the events of a folded module once for all of its calls. Of these
events it keeps the ones that act on units or on storages that the caller knows. It adds up the
others, stretch by stretch. The result gives the same program as ``Tape.expanded``, to the byte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from funcshard._utils import tree
from funcshard.estimate.trace.categories import ACTIVATION, GRADIENT, categories_of
from funcshard.estimate.trace.tape import (
    Alloc,
    Ask,
    At,
    Call,
    Enter,
    Event,
    Exit,
    Free,
    Grad,
    Op,
    Save,
    Tape,
    UseParam,
    joined,
)

# FLOPs, bytes and number of operations, by dtype and whether they have FLOPs.
Counts = dict[tuple[str, bool], list[int]]


def add_operation(counts: Counts, op: Op) -> None:
    """Count an operation."""
    dtype_counts = counts.setdefault((op.dtype, op.flops > 0), [0, 0, 0])
    dtype_counts[0] += op.flops
    dtype_counts[1] += op.bytes
    dtype_counts[2] += 1


class Stretch(NamedTuple):
    """Consecutive events of one module, added up; bytes are relative to those at its start.

    Attributes:
        work: FLOPs, bytes and number of the operations, by dtype and whether they have FLOPs.
        highest: bytes by category when the storages take the most; ``None`` if none is made.
        end: bytes by category at the end.
        saved: bytes of storages that forward makes and backward frees.
        grads: path of a module, number of its call, and the number and the bytes of gradients that
            are complete there. None of them is the last one of its unit.
    """

    work: tuple[tuple[tuple[str, bool], tuple[int, int, int]], ...]
    highest: tuple[int, ...] | None
    end: tuple[int, ...]
    saved: int
    grads: tuple[tuple[str, int, int, int], ...]


def compact(tape: Tape, paths: Collection[str]) -> Iterator[Event | Stretch]:
    """Yield the events of a tape, with stretches in place of most events of folded modules.

    Arguments:
        tape: the tape.
        paths: the paths of all units.
    """
    inside: dict[str, list[str]] = {}  # by module: the units at it and below it
    for path in paths:
        for node in tree.upwards(path) if path else ():
            inside.setdefault(node, []).append(path)
    lives: dict[int, list[Call]] = {}  # by number of a forward call
    for event in tape.events:
        if isinstance(event, Call):
            lives.setdefault(event.instance, []).append(event)
    known_lives: dict[object, tuple[tuple[Event | Stretch, ...], ...]] = {}
    waiting: dict[int, Iterator[tuple[Event | Stretch, ...]]] = {}
    for event in tape.events:
        if not isinstance(event, Call):
            yield event
            continue
        if event.instance not in waiting:
            life = lives[event.instance]
            units = frozenset(unit[len(event.path) + 1 :] for unit in inside.get(event.path, ()))
            key = (
                event.fold,
                units,
                tuple(
                    (stretch.phase, _inner(stretch), frozenset(stretch.freed)) for stretch in life
                ),
            )
            if key not in known_lives:
                known_lives[key] = _summarised(tape, life, units)
            waiting[event.instance] = iter(known_lives[key])
        outside = dict(event.exchanged)
        for life_part in next(waiting[event.instance]):
            yield _outer(life_part, event.path, outside)


def _inner(call: Call) -> frozenset[int]:
    return frozenset(storage_index for storage_index, _ in call.exchanged)


def _outer(event: Event | Stretch, path: str, outside: Mapping[int, int]) -> Event | Stretch:
    """Return an event of a folded module as its caller sees it."""
    if isinstance(event, Stretch):
        if not event.grads:
            return event
        return event._replace(
            grads=tuple((joined(path, grad[0]), *grad[1:]) for grad in event.grads)
        )
    if isinstance(event, (At, Enter, Exit, Ask)):
        return event._replace(path=joined(path, event.path))
    if isinstance(event, UseParam):
        return UseParam(joined(path, event.name))
    if isinstance(event, Grad):
        return Grad(joined(path, event.name), outside.get(event.storage, event.storage), event.call)
    assert isinstance(event, (Alloc, Free, Save)), "the other events are in stretches"
    return event._replace(storage=outside[event.storage])


def _summarised(
    tape: Tape, life: Sequence[Call], units: Collection[str]
) -> tuple[tuple[Event | Stretch, ...], ...]:
    """Return the events of one call of a fold, phase by phase, with stretches.

    Arguments:
        tape: the tape.
        life: the call's phases.
        units: paths of units below the module, and ``""`` if it is one itself.
    """
    # Why such calls: storages that the caller knows keep the numbers that they have inside.
    own_calls = [
        call._replace(
            path="",
            exchanged=tuple((storage_index, storage_index) for storage_index, _ in call.exchanged),
        )
        for call in life
    ]
    phases = list(tape.expanded_calls(own_calls))
    # Why a moment first: a storage may be freed before the first operation.
    begins = [At("", "forward" if call.phase == "forward" else "backward") for call in life]
    every = [
        event for begin, events in zip(begins, phases, strict=True) for event in (begin, *events)
    ]
    categories = categories_of(every)
    summary = _Summary(units)
    summed_events, position = [], 0
    for events in phases:
        position += 1
        summed_events.append(
            tuple(
                summary.phase(events, [categories.get(position + i, 0) for i in range(len(events))])
            )
        )
        position += len(events)
    return tuple(summed_events)


@dataclass(slots=True)
class _Sum:
    """A stretch while it grows."""

    work: Counts = field(default_factory=dict)
    now: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    highest: tuple[int, tuple[int, ...]] | None = None
    saved: int = 0
    grads: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def alloc(self, category: int, size: int, forward: bool) -> None:
        """Add a storage."""
        self.now[category] += size
        total = sum(self.now)
        if self.highest is None or total > self.highest[0]:
            self.highest = total, tuple(self.now)
        if forward and category == ACTIVATION:
            self.saved += size

    def done(self) -> Iterator[Stretch]:
        """Yield the stretch, unless it is empty."""
        if self.work or self.highest is not None or any(self.now) or self.grads:
            yield Stretch(
                tuple(
                    (key, (flops, moved, kernels))
                    for key, (flops, moved, kernels) in self.work.items()
                ),
                None if self.highest is None else self.highest[1],
                tuple(self.now),
                self.saved,
                tuple(
                    (path, call, count, size) for (path, call), (count, size) in self.grads.items()
                ),
            )


class _Summary:
    """Adds up the events of one call of a folded module, phase by phase.

    Attributes:
        units: paths of units below the module.
        live: category and bytes of the storages that only the module knows.
    """

    def __init__(self, units: Collection[str]) -> None:
        self.units = units
        self.live: dict[int, tuple[int, int]] = {}
        self._owners: dict[str, str | None] = {}
        self._held: set[str] = set()  # the outermost modules inside checkpoints

    def owner(self, path: str) -> str | None:
        """Return the innermost unit here that contains a module; ``None`` if the caller's does."""
        if path not in self._owners:
            self._owners[path] = next(
                (node for node in tree.upwards(path) if node in self.units), None
            )
        return self._owners[path]

    def _place(self, path: str) -> object:
        """Return the innermost unit and the innermost checkpoint around a module."""
        return self.owner(path), next(
            (node for node in tree.upwards(path) if node in self._held), None
        )

    def phase(
        self, events: Sequence[Event], categories: Sequence[int]
    ) -> Iterator[Event | Stretch]:
        """Yield the events that act on units or on storages of the caller, and stretches."""
        last = {
            (self.owner(_module(each.name)), each.call): i
            for i, each in enumerate(events)
            if isinstance(each, Grad)
        }
        at: object = None
        forward = False
        moments_before: set[object] = set()  # uses and asks that change nothing if they come again
        depth = 0  # modules that a checkpoint runs again
        counted: set[int] = set()
        stretch = _Sum()
        for position, event in enumerate(events):
            kept = False
            if isinstance(event, Op):
                add_operation(stretch.work, event)
            elif isinstance(event, Alloc):
                kept = event.storage < 0
                if not kept:
                    self.live[event.storage] = categories[position], event.bytes
                    stretch.alloc(categories[position], event.bytes, forward)
            elif isinstance(event, Free):
                kept = event.storage < 0
                if not kept and self.live.get(event.storage, (GRADIENT, 0))[0] != GRADIENT:
                    category, size = self.live.pop(event.storage)
                    stretch.now[category] -= size
            elif isinstance(event, At):
                current_place = (self._place(event.path), event.phase)
                kept, at, forward = current_place != at, current_place, event.phase == "forward"
            elif isinstance(event, (Enter, Exit)):
                kept = event.path in self.units
                if forward:
                    if isinstance(event, Enter) and event.held:
                        self._held.add(event.path)
                        kept = True
                else:
                    depth -= isinstance(event, Exit)
                    kept = kept or not depth  # the outermost module decides for all inside
                    depth += isinstance(event, Enter)
                if kept:
                    moments_before = set()
            elif isinstance(event, Ask):
                kept = (Ask, self._place(event.path)) not in moments_before
                moments_before.add((Ask, self._place(event.path)))
            elif isinstance(event, Save):
                kept = event.storage < 0 and not forward
            elif isinstance(event, UseParam):
                use = (self.owner(_module(event.name)), at)
                kept = use not in moments_before
                moments_before = (
                    {use, *moments_before} if not forward else {use}
                )  # in forward, the last use counts
            elif isinstance(event, Grad):
                owner = self.owner(_module(event.name))
                kept = last[owner, event.call] == position or event.storage < 0
                if last[owner, event.call] == position:
                    moments_before = set()  # the unit may be freed here
                if event.storage > 0:
                    fresh = event.storage in self.live and event.storage not in counted
                    counted.add(event.storage)
                    grads = stretch.grads.setdefault((owner or "", event.call), [0, 0])
                    grads[0] += not kept
                    grads[1] += self.live[event.storage][1] if fresh else 0
            if kept:
                yield from stretch.done()
                stretch = _Sum()
                yield event._replace(inputs=()) if isinstance(event, Enter) else event
        yield from stretch.done()


def _module(name: str) -> str:
    return name.rpartition(".")[0]
