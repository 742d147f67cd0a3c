"""The collectives of a step, predicted from the plan and the schedule alone; tests hold what runs to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from funcshard.plan.cast import ChooseCast
from funcshard.plan.events import Event
from funcshard.plan.plan import BufferPlan, Plan, UnitPlan, dtype_name, dtype_of
from funcshard.plan.schedule import Schedule, check_reduce, joint_runs, make_schedule, together

__all__ = ["predict_events"]

Runs = Mapping[str, tuple[str, ...]]  # by unit, which units share its collectives


Gathers = Callable[[Sequence[str]], list[Event]]  # what units are gathered by together


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
    does it of units that ``not_saved`` would name. A unit that forward calls several times is gathered and reduced as
    often; one that stays gathered is gathered once. (Not predicted is such a unit where only some of its calls have
    gradients or are in a checkpoint, where one checkpoint holds several of them, or where one is inside the unit.) An
    all-reduce over the replicate axis follows when the next unit's reduction has started. Units that the plan joins are
    gathered with the first of them, and reduced with the last.

    Arguments:
        plan: the plan.
        order: the schedule (``sharded.schedule``; for a composition by hand one without prefetch), or names of the units
            in the order in which forward calls them, for ``fully_shard``'s default schedule; by default plan order.
        not_saved: units whose backward needs none of their parameters, which are therefore not gathered again: one that
            is an embedding alone, or a first linear layer whose input needs no gradient.
        recomputed: units that backward computes again, by ``fully_shard(..., remat=...)`` or ``torch.utils.checkpoint``,
            around them or inside; a tuple of names for units that one checkpoint holds together, in the order of forward.
        micro_batches: how many ``accumulate`` runs; each gathers like one gradient.
        reduce: as ``accumulate`` takes it; with ``"once"`` only the last micro-batch's backward reduces, each unit once.
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
    schedule = order if isinstance(order, Schedule) else make_schedule(plan, order)
    stretches = [(each,) if isinstance(each, str) else tuple(each) for each in recomputed]
    spared = frozenset(not_saved)
    make_schedule(plan, sorted(spared))  # names that the plan does not have
    make_schedule(plan, [name for stretch in stretches for name in stretch])
    again = {names[-1]: names for names in stretches if names}
    units, runs = plan.units, joint_runs(plan.unit_list, plan.buckets, cast)
    gathered_with, reduced_with = together(runs, schedule), {name: run for run in runs for name in run}

    def gathers(names: Sequence[str]) -> list[Event]:
        return _gathers([units[name] for name in names], cast)

    found: list[Event] = []
    for number in range(micro_batches):
        reductions = None
        if reduce == "each" or number == micro_batches - 1:
            reductions = _Reductions(units, reduced_with, schedule, once=reduce == "once")
        found += _forward(units, schedule, gathered_with, gathers)
        found += _backward(units, schedule, gathered_with, gathers, spared, again, reductions)
    return tuple(found)


def _forward(units: Mapping[str, UnitPlan], schedule: Schedule, gathered_with: Runs, gathers: Gathers) -> Iterator[Event]:
    ahead: set[str] = set()  # not entered yet, or to stay for the next time
    begun: set[str] = set()

    def begin(name: str) -> list[Event]:
        if name in ahead:
            return []
        names = [each for each in gathered_with.get(name, (name,)) if each == name or each not in begun]
        begun.update(names)
        ahead.update(names)
        return gathers(names)

    for position, name in enumerate(schedule.order):
        yield from begin(name)
        if units[name].reshard_after_forward:
            ahead.remove(name)
        for following in schedule.order[position + 1 : position + 1 + schedule.limit]:
            if schedule.forward_prefetch and following not in schedule.on_demand:
                yield from begin(following)


def _backward(
    units: Mapping[str, UnitPlan],
    schedule: Schedule,
    gathered_with: Runs,
    gathers: Gathers,
    spared: frozenset[str],
    recomputed: Mapping[str, tuple[str, ...]],
    reductions: _Reductions | None,
) -> Iterator[Event]:
    comes_to = schedule.comes_to()
    again = {
        place: name
        for place, (what, name) in enumerate(comes_to)
        if what == "gather" and units[name].reshard_after_forward and name not in spared and gathers([name])
    }
    started: set[int] = set()

    def gather(place: int) -> list[Event]:
        if place in started:
            return []
        run, chosen = gathered_with.get(again[place], (again[place],)), {again[place]: place}
        for later, name in again.items():
            if later > place and name in run:
                chosen.setdefault(name, later)
        names = [name for name in run if name in chosen and chosen[name] not in started]
        started.update(chosen[name] for name in names)
        return gathers(names)

    def gather_after(place: int, most: int = schedule.limit) -> Iterator[Event]:
        for later in [later for later in again if later > place][:most]:
            if again[later] not in schedule.on_demand:
                yield from gather(later)

    early = schedule.backward_prefetch == "pre"
    here: set[str] = set()  # gathered again for the use that backward is at
    if early:
        yield from gather_after(-1, most=1)
    for place, (what, name) in enumerate(comes_to):
        stretch = recomputed.get(name, ())
        if what == "gather" and place in again:
            here.add(name)
            yield from gather(place)
            yield from gather_after(place) if early else ()
            for other in stretch[:-1]:
                yield from gathers([other])
        if what == "gather":
            continue
        if stretch and name not in here:
            for other in stretch:
                yield from gathers([other])
            yield from gather_after(place) if early and units[name].reshard_after_forward else ()
        here.discard(name)
        if schedule.backward_prefetch == "post" and units[name].reshard_after_forward and _reduced(units[name]):
            yield from gather_after(place)
        if reductions is not None:
            yield from reductions.add(name)
    if reductions is not None:
        yield from reductions.late


class _Reductions:
    """The reductions of one backward, as its gradients come.

    Arguments:
        units: the plan's units.
        reduced_with: by unit, which units share its reductions.
        schedule: the schedule, which says what gradients come.
        once: whether the gradients of a unit that come several times add up before they are reduced.

    Attributes:
        late: reductions over the second axis, which follow when the next one over the first has started.
    """

    def __init__(self, units: Mapping[str, UnitPlan], reduced_with: Runs, schedule: Schedule, *, once: bool) -> None:
        self.late: list[Event] = []
        self._units = units
        self._once = once
        self._awaited = Counter(name for what, name in schedule.comes_to() if what == "reduce")
        self._runs = {
            name: tuple(each for each in reduced_with.get(name, (name,)) if each in self._awaited) for name in self._awaited
        }
        self._held: dict[tuple[tuple[str, ...], str], list[str]] = {}
        self._missing: dict[tuple[tuple[str, ...], str], set[str]] = {}

    def add(self, name: str) -> Iterator[Event]:
        """What the gradient of a unit starts."""
        self._awaited[name] -= 1
        if self._once and self._awaited[name]:
            return
        for buffer in _reduced(self._units[name]):
            reduction, run = _reduction([self._units[name]], buffer), self._runs[name]
            if not reduction or len(run) == 1:
                yield from self._start(reduction)
                continue
            held = self._held.setdefault((run, buffer.key), [])
            missing = self._missing.setdefault((run, buffer.key), set(run))
            if name in held:  # a second one is reduced by itself
                yield from self._start_held(run, buffer)
            held.append(name)
            missing.discard(name)
            if not missing:
                yield from self._start_held(run, buffer)

    def _start_held(self, run: tuple[str, ...], buffer: BufferPlan) -> Iterator[Event]:
        held, missing = self._held[run, buffer.key], self._missing[run, buffer.key]
        names = [name for name in run if name in held]
        held.clear()
        missing.update(name for name in names if self._awaited[name])
        yield from self._start(_reduction([self._units[name] for name in names], buffer))

    def _start(self, reduction: list[Event]) -> Iterator[Event]:
        yield from reduction[:1]
        yield from self.late
        self.late = reduction[1:]


def _gathers(units: Sequence[UnitPlan], cast: ChooseCast | None) -> list[Event]:
    """What one unit is gathered by, or several in shared collectives."""
    unit = units[0]
    ranks = unit.mesh_shape[1]
    events = []
    if unit.sharded and ranks > 1:
        for i, buffer in enumerate(unit.buffers):
            if buffer.numel and "shard" not in buffer.local:
                pair = cast and cast(unit, buffer)
                dtype, numel = unit.gathered_dtype(buffer), sum(each.buffers[i].shard_numel for each in units)
                if pair is not None:
                    sent = pair.pre_all_gather(torch.zeros(numel, dtype=dtype_of(buffer.dtype)))
                    dtype, numel = sent.dtype, sent.numel()
                events.append(_event("all_gather", units, buffer, dtype, numel * ranks, "shard", ranks))
    return events


def _reduced(unit: UnitPlan) -> list[BufferPlan]:
    # backward meets a unit's buffers last to first
    return [buffer for buffer in reversed(unit.buffers) if buffer.trainable and buffer.numel]


def _reduction(units: Sequence[UnitPlan], buffer: BufferPlan) -> list[Event]:
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
    kind: str, units: Sequence[UnitPlan], buffer: BufferPlan, dtype: torch.dtype, numel: int, axis: str, ranks: int
) -> Event:
    name = " + ".join(unit.name for unit in units)
    return Event(kind, name, buffer.key, dtype_name(dtype), numel * dtype.itemsize, axis, ranks)
