"""``compact``: a tape in which most events of folded modules are added up, for the units of a plan.

A model of 58 equal blocks of 256 experts has a million events, of which those of one block are
enough. ``compact`` goes through the events of a folded module once for all of its calls. Of these
events it keeps the ones that act on units or on storages that the caller knows. It adds up the
others, stretch by stretch. The result gives the same program as ``Tape.expanded``, to the byte.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from funcshard._utils import tree
from funcshard.estimate.trace.tape import (
    ACTIVATION,
    GRADIENT,
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
    Tape,
    UseParam,
    categories_of,
    joined,
    renumbered,
    rewritten,
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

    work: tuple[tuple[tuple[str, bool], tuple[int, ...]], ...]
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
    known_lives: dict[object, list[list[Event | Stretch]]] = {}
    waiting: dict[int, Iterator[list[Event | Stretch]]] = {}
    for event in tape.events:
        if not isinstance(event, Call):
            yield event
            continue
        module_path = event.path
        if event.instance not in waiting:
            life = lives[event.instance]
            units = frozenset(unit[len(module_path) + 1 :] for unit in inside.get(module_path, ()))
            exchanges = [
                (call.phase, frozenset(dict(call.exchanged)), frozenset(call.freed))
                for call in life
            ]
            key = (event.fold, units, *exchanges)
            if key not in known_lives:
                known_lives[key] = _summarised(tape, life, units)
            waiting[event.instance] = iter(known_lives[key])
        storage = renumbered(dict(event.exchanged))
        inner_path = functools.partial(joined, module_path)
        for part in next(waiting[event.instance]):
            if isinstance(part, Stretch):
                grads = tuple((inner_path(grad[0]), *grad[1:]) for grad in part.grads)
                yield part._replace(grads=grads) if grads else part
            else:
                yield rewritten(part, inner_path, storage)


def _summarised(
    tape: Tape, life: Sequence[Call], units: Collection[str]
) -> list[list[Event | Stretch]]:
    """Return the events of one call of a fold, phase by phase, with stretches.

    Arguments:
        tape: the tape.
        life: the call's phases.
        units: paths of units below the module, and ``""`` if it is one itself.
    """
    # Why such calls: storages that the caller knows keep the numbers that they have inside.
    inner_calls = [
        call._replace(path="", exchanged=tuple((inside, inside) for inside, _ in call.exchanged))
        for call in life
    ]
    phases = list(tape.expanded_calls(inner_calls))
    all_events: list[Event] = []
    for call, events in zip(life, phases, strict=True):
        # Why a moment first: a storage may be freed before the first operation.
        all_events.append(At("", "forward" if call.phase == "forward" else "backward"))
        all_events += events
    categories = categories_of(all_events)
    summary = _Summary(units)
    summed_phases, position = [], 0
    for events in phases:
        position += 1
        phase_categories = [categories.get(position + i, 0) for i in range(len(events))]
        summed_phases.append(list(summary.phase(events, phase_categories)))
        position += len(events)
    return summed_phases


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
                work=tuple((key, tuple(counts)) for key, counts in self.work.items()),
                highest=self.highest and self.highest[1],
                end=tuple(self.now),
                saved=self.saved,
                grads=tuple(
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
            self._owners[path] = _innermost(path, self.units)
        return self._owners[path]

    def _place(self, path: str) -> object:
        """Return the innermost unit and the innermost checkpoint around a module."""
        return self.owner(path), _innermost(path, self._held)

    def phase(
        self, events: Sequence[Event], categories: Sequence[int]
    ) -> Iterator[Event | Stretch]:
        """Yield the events that act on units or on storages of the caller, and stretches."""
        last = {
            (self.owner(_module(event.path)), event.call): position
            for position, event in enumerate(events)
            if isinstance(event, Grad)
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
            elif isinstance(event, (Alloc, Free)) and event.storage < 0:
                kept = True  # the caller knows the storage
            elif isinstance(event, Alloc):
                self.live[event.storage] = categories[position], event.bytes
                stretch.alloc(categories[position], event.bytes, forward)
            elif isinstance(event, Free):
                if self.live.get(event.storage, (GRADIENT, 0))[0] != GRADIENT:
                    category, size = self.live.pop(event.storage)
                    stretch.now[category] -= size
            elif isinstance(event, At):
                place = self._place(event.path), event.phase
                kept, at, forward = place != at, place, event.phase == "forward"
            elif isinstance(event, (Enter, Exit)):
                kept = event.path in self.units
                if not forward:
                    depth -= isinstance(event, Exit)
                    kept = kept or not depth  # the outermost module decides for all inside
                    depth += isinstance(event, Enter)
                elif isinstance(event, Enter) and event.held:
                    self._held.add(event.path)
                    kept = True
                if kept:
                    moments_before = set()
            elif isinstance(event, Ask):
                ask = Ask, self._place(event.path)
                kept = ask not in moments_before
                moments_before.add(ask)
            elif isinstance(event, UseParam):
                use = self.owner(_module(event.path)), at
                kept = use not in moments_before
                if forward:  # the last use counts
                    moments_before = set()
                moments_before.add(use)
            elif isinstance(event, Grad):
                unit = self.owner(_module(event.path)), event.call
                is_last = last[unit] == position
                kept = is_last or event.storage < 0
                if is_last:
                    moments_before = set()  # the unit may be freed here
                if event.storage > 0:
                    figures = stretch.grads.setdefault((unit[0] or "", event.call), [0, 0])
                    figures[0] += not kept
                    # Note: gradients of tied parameters may share a storage, which counts once.
                    if event.storage in self.live and event.storage not in counted:
                        figures[1] += self.live[event.storage][1]
                    counted.add(event.storage)
            if kept:
                yield from stretch.done()
                stretch = _Sum()
                yield event
        yield from stretch.done()


def _innermost(path: str, nodes: Collection[str]) -> str | None:
    return next((node for node in tree.upwards(path) if node in nodes), None)


def _module(path: str) -> str:
    return path.rpartition(".")[0]
