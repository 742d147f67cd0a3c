"""``compact``: a tape in which most events of folded modules are added up, for the units of a plan.

A model of 58 equal blocks of 256 experts has a million events. ``compact`` goes through the events
of a folded module once for all of its calls. It keeps events that act on units or on storages that
the caller knows, and adds up the rest. The program is the same as that of all events.
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
        work: FLOPs, bytes and number of operations, by dtype and whether they have FLOPs.
        highest: bytes by category at their most; ``None`` if no storage is made.
        end: bytes by category at the end.
        saved: bytes of storages that forward makes and backward frees.
        grads: module, call, number and bytes of gradients; none of them is the last one of its
            unit.
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
    units_by_module: dict[str, list[str]] = {}  # by module: the units at it and below it
    for path in paths:
        for node in tree.upwards(path) if path else ():
            units_by_module.setdefault(node, []).append(path)
    calls_by_instance: dict[int, list[Call]] = {}  # by number of a forward call
    for event in tape.events:
        if isinstance(event, Call):
            calls_by_instance.setdefault(event.instance, []).append(event)
    known_lives: dict[object, list[list[Event | Stretch]]] = {}
    waiting_parts: dict[int, Iterator[list[Event | Stretch]]] = {}
    for event in tape.events:
        if not isinstance(event, Call):
            yield event
            continue
        module_path = event.path
        # Note: calls with equal phases share one summary, whose parts come in the order of the
        # tape: forward first, then recomputation and backward.
        if event.instance not in waiting_parts:
            instance_calls = calls_by_instance[event.instance]
            units_inside = frozenset(
                unit[len(module_path) + 1 :]
                for unit in units_by_module.get(module_path, ())
            )
            # Why these: the same fold may free or exchange other storages where it is called
            # otherwise.
            exchanges = [
                (call.phase, frozenset(dict(call.exchanged)), frozenset(call.freed))
                for call in instance_calls
            ]
            life_key = (event.fold, units_inside, *exchanges)
            if life_key not in known_lives:
                known_lives[life_key] = _summarised(tape, instance_calls, units_inside)
            waiting_parts[event.instance] = iter(known_lives[life_key])
        storage = renumbered(dict(event.exchanged))
        # Note: the summary has paths below the module, and the numbers of the fold's storages.
        inner_path = functools.partial(joined, module_path)
        for part in next(waiting_parts[event.instance]):
            if isinstance(part, Stretch):
                grads = tuple((inner_path(grad[0]), *grad[1:]) for grad in part.grads)
                if grads:
                    part = part._replace(grads=grads)
                yield part
            else:
                yield rewritten(part, inner_path, storage)


def _summarised(
    tape: Tape, life: Sequence[Call], units: Collection[str]
) -> list[list[Event | Stretch]]:
    """Return the events of one call of a fold, phase by phase, with stretches.

    Arguments:
        tape: the tape.
        life: the call's phases.
        units: paths of units below the module, and ``""`` if it's one itself.
    """
    # Why such calls: storages that the caller knows keep the numbers that they have inside.
    inner_calls = [
        call._replace(
            path="", exchanged=tuple((inside, inside) for inside, _ in call.exchanged)
        )
        for call in life
    ]
    phase_events = list(tape.expanded(inner_calls))
    all_events: list[Event] = []
    for call, events in zip(life, phase_events, strict=True):
        # Why a moment first: a storage may be freed before the first operation.
        all_events.append(At("", "forward" if call.phase == "forward" else "backward"))
        all_events += events
    # Note: over all phases, because backward frees what forward saved.
    categories = categories_of(all_events)
    summary = _Summary(units)
    summed_phases, event_position = [], 0
    for events in phase_events:
        event_position += 1
        phase_categories = [
            categories.get(event_position + i, 0) for i in range(len(events))
        ]
        summed_phases.append(list(summary.phase(events, phase_categories)))
        event_position += len(events)
    return summed_phases


@dataclass(slots=True)
class _Sum:
    work: Counts = field(default_factory=dict)
    now: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    highest: tuple[int, tuple[int, ...]] | None = None
    saved: int = 0
    grads: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def alloc(self, category: int, size: int, forward: bool) -> None:
        self.now[category] += size
        total_bytes = sum(self.now)
        if self.highest is None or total_bytes > self.highest[0]:
            self.highest = total_bytes, tuple(self.now)
        if forward and category == ACTIVATION:
            self.saved += size

    def done(self) -> Iterator[Stretch]:
        if self.work or self.highest is not None or any(self.now) or self.grads:
            yield Stretch(
                work=tuple((key, tuple(counts)) for key, counts in self.work.items()),
                highest=self.highest and self.highest[1],
                end=tuple(self.now),
                saved=self.saved,
                grads=tuple(
                    (path, call, count, size)
                    for (path, call), (count, size) in self.grads.items()
                ),
            )


class _Summary:
    """Adds up the events of one call of a folded module, phase by phase."""

    def __init__(self, units: Collection[str]) -> None:
        self.units = units
        self.live: dict[int, tuple[int, int]] = {}
        # The innermost unit here around a module, or ``None``.
        self.owner = functools.cache(functools.partial(_innermost, nodes=units))
        self._held: set[str] = set()  # the outermost modules inside checkpoints

    def _place(self, path: str) -> object:
        return self.owner(path), _innermost(path, self._held)

    def phase(
        self, events: Sequence[Event], categories: Sequence[int]
    ) -> Iterator[Event | Stretch]:
        """Yield the events that a plan's units or the caller have to see, and stretches."""
        last_positions = {
            (self.owner(_module(event.path)), event.call): position
            for position, event in enumerate(events)
            if isinstance(event, Grad)
        }
        current_place: object = None
        is_forward = False
        moments_before: set[object] = (
            set()
        )  # uses and asks that change nothing if they come again
        nested_depth = 0  # modules that a checkpoint runs again
        counted_storages: set[int] = set()
        open_stretch = _Sum()
        for position, event in enumerate(events):
            is_kept = False
            if isinstance(event, Op):
                add_operation(open_stretch.work, event)
            elif isinstance(event, (Alloc, Free)) and event.storage < 0:
                is_kept = True  # the caller knows the storage
            elif isinstance(event, Alloc):
                self.live[event.storage] = categories[position], event.bytes
                open_stretch.alloc(categories[position], event.bytes, is_forward)
            elif isinstance(event, Free):
                if self.live.get(event.storage, (GRADIENT, 0))[0] != GRADIENT:
                    category, size = self.live.pop(event.storage)
                    open_stretch.now[category] -= size
            elif isinstance(event, At):
                place = self._place(event.path), event.phase
                # Note: a place counts only if the unit or the checkpoint around it is another one.
                is_kept = place != current_place
                current_place = place
                is_forward = event.phase == "forward"
            elif isinstance(event, (Enter, Exit)):
                is_kept = event.path in self.units
                if not is_forward:
                    nested_depth -= isinstance(event, Exit)
                    is_kept = (
                        is_kept or not nested_depth
                    )  # the outermost module decides for all inside
                    nested_depth += isinstance(event, Enter)
                elif isinstance(event, Enter) and event.held:
                    self._held.add(event.path)
                    is_kept = True
                if is_kept:
                    moments_before = set()
            elif isinstance(event, Ask):
                asked_place = Ask, self._place(event.path)
                is_kept = asked_place not in moments_before
                moments_before.add(asked_place)
            elif isinstance(event, UseParam):
                param_use = self.owner(_module(event.path)), current_place
                is_kept = param_use not in moments_before
                if is_forward:  # the last use counts
                    moments_before = set()
                moments_before.add(param_use)
            elif isinstance(event, Grad):
                unit_call = self.owner(_module(event.path)), event.call
                # Note: with its last gradient the unit may be reduced, so a plan has to see that
                # one.
                is_last = last_positions[unit_call] == position
                is_kept = is_last or event.storage < 0
                if is_last:
                    moments_before = set()  # the unit may be freed here
                if event.storage > 0:
                    grad_figures = open_stretch.grads.setdefault(
                        (unit_call[0] or "", event.call), [0, 0]
                    )
                    grad_figures[0] += not is_kept
                    # Note: gradients of tied parameters may share a storage, which counts once.
                    if event.storage in self.live and event.storage not in counted_storages:
                        grad_figures[1] += self.live[event.storage][1]
                    counted_storages.add(event.storage)
            if is_kept:
                yield from open_stretch.done()
                open_stretch = _Sum()
                yield event
        yield from open_stretch.done()


def _innermost(path: str, nodes: Collection[str]) -> str | None:
    return next((node for node in tree.upwards(path) if node in nodes), None)


def _module(path: str) -> str:
    return path.rpartition(".")[0]
