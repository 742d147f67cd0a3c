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

__all__ = ["Stretch", "compact"]


class Stretch(NamedTuple):
    """Consecutive events of one module, added up; bytes are relative to those at its start.

    Attributes:
        work: FLOPs, bytes and number of the operations, by dtype and whether they have FLOPs.
        highest: bytes by category when the storages take the most; ``None`` if none is made.
        end: bytes by category at the end.
        saved: bytes of storages that forward makes and backward frees.
        grads: path of a module, and the number and the bytes of gradients that are complete there.
            None of them is the last one of its unit.
    """

    work: tuple[tuple[tuple[str, bool], tuple[int, int, int]], ...]
    highest: tuple[int, ...] | None
    end: tuple[int, ...]
    saved: int
    grads: tuple[tuple[str, int, int], ...]


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
    known: dict[object, tuple[tuple[Event | Stretch, ...], ...]] = {}
    waiting: dict[int, Iterator[tuple[Event | Stretch, ...]]] = {}
    for event in tape.events:
        if not isinstance(event, Call):
            yield event
            continue
        if event.instance not in waiting:
            life = lives[event.instance]
            units = frozenset(unit[len(event.path) + 1 :] for unit in inside.get(event.path, ()))
            key = (event.fold, units, tuple((each.phase, _inner(each), frozenset(each.freed)) for each in life))
            if key not in known:
                known[key] = _summarised(tape, life, units)
            waiting[event.instance] = iter(known[key])
        outside = dict(event.exchanged)
        for each in next(waiting[event.instance]):
            yield _outer(each, event.path, outside)


def _inner(call: Call) -> frozenset[int]:
    return frozenset(number for number, _ in call.exchanged)


def _outer(event: Event | Stretch, path: str, outside: Mapping[int, int]) -> Event | Stretch:
    """Return an event of a folded module as its caller sees it."""
    if isinstance(event, Stretch):
        if not event.grads:
            return event
        return event._replace(grads=tuple((joined(path, below), count, size) for below, count, size in event.grads))
    if isinstance(event, (At, Enter, Exit)):
        return event._replace(path=joined(path, event.path))
    if isinstance(event, UseParam):
        return UseParam(joined(path, event.name))
    if isinstance(event, Grad):
        return Grad(joined(path, event.name), outside.get(event.storage, event.storage))
    assert isinstance(event, (Alloc, Free, Save)), "the other events are in stretches"
    return event._replace(storage=outside[event.storage])


def _summarised(tape: Tape, life: Sequence[Call], units: Collection[str]) -> tuple[tuple[Event | Stretch, ...], ...]:
    """Return the events of one call of a fold, phase by phase, with stretches.

    Arguments:
        tape: the tape.
        life: the call's phases.
        units: paths of units below the module, and ``""`` if it is one itself.
    """
    # Why such calls: storages that the caller knows keep the numbers that they have inside.
    own = [call._replace(path="", exchanged=tuple((number, number) for number, _ in call.exchanged)) for call in life]
    phases = list(tape.expanded_calls(own))
    # Why a moment first: a storage may be freed before the first operation.
    begins = [At("", "forward" if call.phase == "forward" else "backward") for call in life]
    every = [event for begin, events in zip(begins, phases, strict=True) for event in (begin, *events)]
    categories = categories_of(every)
    summary = _Summary(units)
    found, position = [], 0
    for events in phases:
        position += 1
        found.append(tuple(summary.phase(events, [categories.get(position + i, 0) for i in range(len(events))])))
        position += len(events)
    return tuple(found)


@dataclass(slots=True)
class _Sum:
    """A stretch while it grows."""

    work: dict[tuple[str, bool], list[int]] = field(default_factory=dict)
    now: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    highest: tuple[int, tuple[int, ...]] | None = None
    saved: int = 0
    grads: dict[str, list[int]] = field(default_factory=dict)

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
                tuple((key, (flops, moved, kernels)) for key, (flops, moved, kernels) in self.work.items()),
                None if self.highest is None else self.highest[1],
                tuple(self.now),
                self.saved,
                tuple((path, count, size) for path, (count, size) in self.grads.items()),
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

    def owner(self, path: str) -> str | None:
        """Return the innermost unit here that contains a module; ``None`` if the caller's does."""
        if path not in self._owners:
            self._owners[path] = next((node for node in tree.upwards(path) if node in self.units), None)
        return self._owners[path]

    def phase(self, events: Sequence[Event], categories: Sequence[int]) -> Iterator[Event | Stretch]:
        """Yield the events that act on units or on storages of the caller, and stretches."""
        last = {self.owner(_module(event.name)): i for i, event in enumerate(events) if isinstance(event, Grad)}
        at: object = None
        forward = False
        used: set[str | None] = set()
        counted: set[int] = set()
        stretch = _Sum()
        for position, event in enumerate(events):
            kept = False
            if isinstance(event, Op):
                work = stretch.work.setdefault((event.dtype, event.flops > 0), [0, 0, 0])
                work[0] += event.flops
                work[1] += event.bytes
                work[2] += 1
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
                here = (self.owner(event.path), event.phase)
                kept, at, forward = here != at, here, event.phase == "forward"
            elif isinstance(event, (Enter, Exit)):
                kept = event.path in self.units
            elif isinstance(event, Save):
                kept = event.storage < 0 and not forward
            elif isinstance(event, UseParam):
                owner = self.owner(_module(event.name))
                kept = owner not in used  # a further one changes nothing
                used.add(owner)
            elif isinstance(event, Grad):
                owner = self.owner(_module(event.name))
                kept = last[owner] == position or event.storage < 0
                if last[owner] == position:
                    used = set()  # the unit may be freed here
                if event.storage > 0:
                    fresh = event.storage in self.live and event.storage not in counted
                    counted.add(event.storage)
                    grads = stretch.grads.setdefault(owner or "", [0, 0])
                    grads[0] += not kept
                    grads[1] += self.live[event.storage][1] if fresh else 0
            if kept:
                yield from stretch.done()
                stretch = _Sum()
                yield event._replace(inputs=()) if isinstance(event, Enter) else event
        yield from stretch.done()


def _module(name: str) -> str:
    return name.rpartition(".")[0]
