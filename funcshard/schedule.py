"""The schedule: when units are gathered ahead of their use, as data, and what a step does, predicted from it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from funcshard import table
from funcshard.cast import ChooseCast
from funcshard.events import Event
from funcshard.plan import BufferPlan, Plan, UnitPlan, dtype_name, dtype_of

__all__ = ["Schedule", "check_reduce", "make_schedule", "predict_events"]

BACKWARD = ("pre", "post", None)


@dataclass(frozen=True, slots=True, repr=False)
class Schedule:
    """When units are gathered ahead of their use; made by ``make_schedule``.

    Attributes:
        order: names of the units in the order in which forward calls them, the root first where it owns anything.
        forward_prefetch: whether forward gathers the next unit before the current one computes.
        backward_prefetch: ``"pre"``: backward gathers the next unit before the current one's gradients are computed, and
            the first before all else; ``"post"``: when they have been; ``None``: on demand.
        limit: most units that are gathered ahead at a time.
        on_demand: units that are never gathered ahead.
        backward: what backward comes to, in order: ``("gather", unit)`` where it first needs the unit's leaves,
            ``("reduce", unit)`` where their gradients are complete. ``None``: the units in the opposite of ``order``, each
            gathered and then reduced, as where none is called inside another. ``fully_shard`` learns it.

    Example:
        >>> import torch, funcshard as fs
        >>> plan = fs.make_plan({"a": torch.zeros(4), "b": torch.zeros(4)}, 2, units=["a", "b"])
        >>> fs.make_schedule(plan) == fs.Schedule(("a", "b"), True, "pre", limit=1)
        True
    """

    order: tuple[str, ...]
    forward_prefetch: bool
    backward_prefetch: str | None
    limit: int
    on_demand: tuple[str, ...] = ()
    backward: tuple[tuple[str, str], ...] | None = None

    def __post_init__(self) -> None:
        if self.backward_prefetch not in BACKWARD:
            raise ValueError(f"backward_prefetch must be 'pre', 'post' or None; found {self.backward_prefetch!r}")
        if not isinstance(self.limit, int) or self.limit < 1:
            raise ValueError(f"limit must be a whole number of units, at least 1; found {self.limit!r}")
        if len(set(self.order)) != len(self.order):
            twice = next(name for name in self.order if self.order.count(name) > 1)
            raise ValueError(f"order must name each unit once; found {twice!r} more than once")

    def __str__(self) -> str:
        title = (
            f"Schedule of {len(self.order)} units: forward prefetch {'on' if self.forward_prefetch else 'off'}, backward "
            f"prefetch {self.backward_prefetch or 'off'}, at most {self.limit} ahead"
        )
        title += f", on demand {', '.join(self.on_demand)}" if self.on_demand else ""
        ahead = [*self.order[1:], ""] if self.forward_prefetch else [""] * len(self.order)
        needs = [name for what, name in self.comes_to() if what == "gather"]
        then = dict(itertools.pairwise(needs)) if self.backward_prefetch else {}
        before = [then.get(name, "") for name in self.order]
        ahead, before = ([n if n not in self.on_demand else "" for n in column] for column in (ahead, before))
        rows = [
            [str(i), name or "(root)", after, earlier]
            for i, (name, after, earlier) in enumerate(zip(self.order, ahead, before, strict=True))
        ]
        return table.as_text(title, ["position", "unit", "forward gathers next", "backward gathers next"], rows)

    __repr__ = __str__

    def comes_to(self) -> tuple[tuple[str, str], ...]:
        """What backward comes to, in order: see ``backward``."""
        if self.backward is not None:
            return self.backward
        return tuple((what, name) for name in self.order[::-1] for what in ("gather", "reduce"))


def make_schedule(
    plan: Plan,
    order: Sequence[str] | None = None,
    *,
    forward_prefetch: bool = True,
    backward_prefetch: str | None = "pre",
    limit: int = 1,
    on_demand: Iterable[str] = (),
) -> Schedule:
    """Plan when units are gathered ahead of their use, so that communication runs under computation.

    Arguments:
        plan: the plan.
        order: names of the units in the order in which forward calls them; by default plan order. ``fully_shard``
            learns the real order at its first call if none is given to it.
        forward_prefetch: whether forward gathers the next unit before the current one computes.
        backward_prefetch: ``"pre"``, ``"post"`` or ``None``; see ``Schedule``.
        limit: most units that are gathered ahead at a time; those that the plan joins come with the first of them.
        on_demand: names of units that are never gathered ahead: single ones without prefetch, gathered by themselves.

    Returns:
        The schedule, for ``fully_shard`` and ``predict_events``.

    Raises:
        ValueError: ``order`` or ``on_demand`` names a unit that the plan does not have, or ``order`` one twice; a setting
            that does not exist.

    Example:
        >>> import torch, funcshard as fs
        >>> plan = fs.make_plan({"a": torch.zeros(4), "b": torch.zeros(4)}, 2, units=["a", "b"])
        >>> fs.make_schedule(plan, backward_prefetch="post").order
        ('a', 'b')

    Source: ``BackwardPrefetch`` and ``forward_prefetch`` of ``torch.distributed.fsdp.FullyShardedDataParallel``.
    """
    names = [name for name in plan.units if name != ""] if order is None else [name for name in order if name != ""]
    spared = tuple(sorted(on_demand))
    for name in (*names, *spared):
        if name not in plan.units:
            raise ValueError(
                f"the plan has no unit {name!r} to put in order; its units are {[n for n in plan.units if n][:6]}"
            )
    root = [""] if "" in plan.units else []
    return Schedule((*root, *names), forward_prefetch, backward_prefetch, limit, spared)


def predict_events(
    plan: Plan,
    order: Sequence[str] | Schedule | None = None,
    *,
    not_saved: Iterable[str] = (),
    recomputed: Iterable[str | tuple[str, ...]] = (),
    micro_batches: int = 1,
    reduce: str = "each",
    cast: ChooseCast | None = None,
) -> tuple[Event, ...]:
    """Return the collectives that one ``value_and_grad`` of a ``fully_shard``ed model issues on a rank, in order.

    The root is gathered first and reduced last; the units are gathered in ``order`` in forward, and in backward each is
    gathered again, if the plan reshards it after forward, and reduced, in the opposite order; with a schedule, gathered
    ahead as it says. Where units are called inside others, backward gathers the outer one before the inner ones if it
    uses its own leaves after it calls them: the schedule of a sharded function that has run with gradients knows, and so
    does it of units that ``not_saved`` would name. A unit that one call enters twice is gathered and reduced twice, which is
    not predicted. An all-reduce over the replicate axis follows when the next unit's reduction has started. Units that the
    plan joins are gathered with the first of them, and reduced with the last.

    Arguments:
        plan: the plan.
        order: the schedule (``sharded.schedule``; for a composition by hand one without prefetch), or names of the units
            in the order in which forward calls them, for ``fully_shard``'s default schedule; by default plan order.
        not_saved: units whose backward needs none of their parameters, which are therefore not gathered again: one that
            is an embedding alone, or a first linear layer whose input needs no gradient.
        recomputed: units that backward computes again, by ``fully_shard(..., remat=...)`` or ``torch.utils.checkpoint``,
            around them or inside; a tuple of names for units that one checkpoint holds together, in the order of forward.
        micro_batches: how many ``accumulate`` runs; each gathers like one gradient.
        reduce: as ``accumulate`` takes it; with ``"once"`` only the last micro-batch's backward reduces.
        cast: as ``fully_shard`` takes it.

    Returns:
        The events, equal to what ``record_events`` records around the step.

    Raises:
        ValueError: ``order``, ``not_saved`` or ``recomputed`` names a unit that the plan does not have; ``micro_batches``
            or ``reduce`` is not as ``accumulate`` takes it.

    Example:
        >>> import torch, funcshard as fs
        >>> plan = fs.make_plan({"a": torch.zeros(4), "b": torch.zeros(4)}, 2, units=["b"])
        >>> [(event.kind, event.unit) for event in fs.predict_events(plan)]  # doctest: +NORMALIZE_WHITESPACE
        [('all_gather', ''), ('all_gather', 'b'),
         ('all_gather', 'b'), ('reduce_scatter', 'b'), ('reduce_scatter', '')]
    """
    check_reduce(micro_batches, reduce)
    schedule = order
    if not isinstance(schedule, Schedule):
        schedule = make_schedule(plan, schedule)
    stretches = [(each,) if isinstance(each, str) else tuple(each) for each in recomputed]
    make_schedule(plan, list(not_saved))  # names that the plan does not have
    make_schedule(plan, [name for stretch in stretches for name in stretch])
    before_last = {stretch[-1]: [plan.units[name] for name in stretch[:-1]] for stretch in stretches if stretch}
    units, joint = plan.units, joint_runs(plan.unit_list, plan.joined, cast)
    forward = [units[name] for name in schedule.order]
    gathered_with, reduced_with = together(joint, schedule), {name: run for run in joint for name in run}
    spared = set(not_saved)
    backward = [(what, plan.units[name]) for what, name in schedule.comes_to()]
    again = [
        (place, unit)
        for place, (what, unit) in enumerate(backward)
        if what == "gather" and unit.reshard_after_forward and unit.name not in spared and any(_gathers([unit], None))
    ]
    later = {unit.name: place for place, unit in again}
    to_reduce = {unit.name for what, unit in backward if what == "reduce"}

    def gather(wanted: list[UnitPlan], started: set[str], places: dict[str, int]) -> Iterator[Event]:
        for unit in wanted:
            if unit.name not in started:
                run = gathered_with.get(unit.name, (unit.name,))
                left = [n for n in run if n not in started and places.get(n, -1) >= places[unit.name]]
                started.update(left)
                yield from _gathers([units[name] for name in left], cast)

    def allowed(units: list[UnitPlan]) -> list[UnitPlan]:
        return [unit for unit in units if unit.name not in schedule.on_demand]

    def others_again(last: UnitPlan) -> Iterator[Event]:
        for unit in before_last.get(last.name, ()):
            yield from _gathers([unit], cast)

    def events(reducing: bool) -> Iterator[Event]:
        started: set[str] = set()
        anywhere = dict.fromkeys(schedule.order, 0)
        for position, unit in enumerate(forward):
            yield from gather([unit], started, anywhere)
            if schedule.forward_prefetch:
                yield from gather(allowed(forward[position + 1 : position + 1 + schedule.limit]), started, anywhere)
        late: list[Event] = []
        started, reduced = set(), set()
        if schedule.backward_prefetch == "pre":
            yield from gather(allowed([unit for _, unit in again[:1]]), started, later)
        for position, (what, unit) in enumerate(backward):
            ahead = allowed([other for place, other in again if place > position][: schedule.limit])
            if what == "gather":
                if (position, unit) in again:
                    yield from gather([unit], started, later)
                    yield from gather(ahead if schedule.backward_prefetch == "pre" else [], started, later)
                    yield from others_again(unit)
                continue
            if unit.name in before_last and unit.name not in (other.name for _, other in again):
                yield from others_again(unit)
                yield from _gathers([unit], cast)
                if unit.reshard_after_forward and schedule.backward_prefetch == "pre":
                    yield from gather(ahead, started, later)
            if schedule.backward_prefetch == "post" and unit.reshard_after_forward and _reduced(unit):
                yield from gather(ahead, started, later)
            reduced.add(unit.name)
            run = [name for name in reduced_with.get(unit.name, (unit.name,)) if name in to_reduce]
            for buffer in _reduced(unit) if reducing else ():
                alone = _reduction([unit], buffer)
                if alone and not reduced.issuperset(run):
                    continue  # held until the last one has come
                reduction = alone and _reduction([units[name] for name in run], buffer)
                yield from reduction[:1]
                yield from late
                late = reduction[1:]
        yield from late

    last = micro_batches - 1
    return tuple(event for i in range(micro_batches) for event in events(reduce == "each" or i == last))


def check_reduce(micro_batches: Any, reduce: Any) -> None:
    """Raise ``ValueError`` unless the two say how to accumulate."""
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"the number of micro-batches must be a whole number, at least 1; found {micro_batches!r}")
    if reduce not in ("each", "once"):
        raise ValueError(f"reduce must be 'each' or 'once'; found {reduce!r}")


def joint_runs(
    units: Iterable[UnitPlan], joined: Iterable[tuple[str, ...]], cast: ChooseCast | None
) -> list[tuple[str, ...]]:
    """Return the runs of a plan that share their collectives as the units are run.

    Arguments:
        units: the units, in the precision of their mode.
        joined: the plan's runs.
        cast: what chooses casts; a unit that has one is gathered by itself, because a cast sees one shard.
    """
    by_name = {unit.name: unit for unit in units}
    found = []
    for run in joined:
        alike: dict[Any, list[str]] = {}
        for unit in (by_name[name] for name in run):
            if cast is None or not any(cast(unit, buffer) for buffer in unit.buffers):
                alike.setdefault(unit.collective, []).append(unit.name)
        found += [tuple(names) for names in alike.values() if len(names) > 1]
    return found


def together(runs: Iterable[tuple[str, ...]], schedule: Schedule) -> dict[str, tuple[str, ...]]:
    """Return, by unit, which units are gathered in one collective: of a run, those that may be gathered ahead."""
    ordered = set(schedule.order) - set(schedule.on_demand)
    found: dict[str, tuple[str, ...]] = {}
    for run in runs:
        names = tuple(name for name in run if name in ordered)
        found |= dict.fromkeys(names, names)
    return found


def _gathers(units: list[UnitPlan], cast: ChooseCast | None) -> Iterator[Event]:
    """What one unit is gathered by, or several in shared collectives."""
    unit = units[0]
    ranks = unit.mesh_shape[1]
    if unit.sharded and ranks > 1:
        for i, buffer in enumerate(unit.buffers):
            if buffer.numel and "shard" not in buffer.local:
                pair = cast and cast(unit, buffer)
                dtype, numel = unit.gathered_dtype(buffer), sum(each.buffers[i].shard_numel for each in units)
                if pair is not None:
                    sent = pair.before(torch.zeros(numel, dtype=dtype_of(buffer.dtype)))
                    dtype, numel = sent.dtype, sent.numel()
                yield _event("all_gather", units, buffer, dtype, numel * ranks, "shard", ranks)


def _reduced(unit: UnitPlan) -> list[BufferPlan]:
    # backward meets a unit's buffers last to first
    return [buffer for buffer in reversed(unit.buffers) if buffer.trainable and buffer.numel]


def _reduction(units: list[UnitPlan], buffer: BufferPlan) -> list[Event]:
    """What one buffer's gradient is reduced by, or those of several units' buffers of its key."""
    unit = units[0]
    replicate, shard = unit.mesh_shape
    dtype = unit.reduced_dtype(buffer)
    alike = [each for other in units for each in other.buffers if each.key == buffer.key]
    events = []
    if shard > 1 and "shard" not in buffer.local:
        kind = "reduce_scatter" if unit.sharded else "all_reduce"
        events.append(_event(kind, units, buffer, dtype, sum(each.padded_numel for each in alike), "shard", shard))
    if replicate > 1 and "replicate" not in buffer.local:
        numel = sum(each.shard_numel for each in alike)
        events.append(_event("all_reduce", units, buffer, dtype, numel, "replicate", replicate))
    return events


def _event(
    kind: str, units: list[UnitPlan], buffer: BufferPlan, dtype: torch.dtype, numel: int, axis: str, ranks: int
) -> Event:
    name = " + ".join(unit.name for unit in units)
    return Event(kind, name, buffer.key, dtype_name(dtype), numel * dtype.itemsize, axis, ranks)
