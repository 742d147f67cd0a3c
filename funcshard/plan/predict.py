"""Predict the collectives of a step from the plan and the schedule alone.

The prediction drives the state machines of ``execution_order``, which the runtime drives too; tests
compare the predicted events with the recorded ones.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from funcshard._utils import check_count, dtype_name, dtype_of, tree
from funcshard.plan.cast import ChooseCast, cast_of
from funcshard.plan.events import Event
from funcshard.plan.execution_order import BackwardOrder, ForwardOrder
from funcshard.plan.plan import Plan, check_plan
from funcshard.plan.reduce_choice import (
    Reduce,
    buffer_mode,
    check_reduce,
    check_reduce_units,
    unit_mode,
)
from funcshard.plan.schedule import Schedule, check_schedule, make_schedule
from funcshard.plan.unit_plan import BufferPlan, UnitPlan


class Reached(NamedTuple):
    """A place that the step has reached, just before the collectives that start there.

    Attributes:
        what: ``"forward"``: forward calls the unit; ``"backward"``: forward is over; ``"need"``:
            backward needs the unit's leaves; ``"again"``: a checkpoint calls the unit again, beside
            the leaves that backward needs; ``"reduce"``: the unit's gradients are complete;
            ``"leave"``: backward leaves one call of a unit that has no gradients.
        unit: name of the unit; ``""`` at the start of backward.
    """

    what: str
    unit: str


def predict_events(
    plan: Plan,
    order: Sequence[str] | Schedule | None = None,
    *,
    not_saved: Iterable[str] = (),
    recomputed: Iterable[str | tuple[str, ...]] = (),
    micro_batches: int = 1,
    reduce: Reduce = "each",
    cast: ChooseCast | None = None,
    forwards: int = 1,
) -> tuple[Event, ...]:
    """Return, in order, the collectives of one ``value_and_grad`` of a sharded model on a rank.

    The root is gathered first and reduced last. Forward gathers the units in ``order``. Backward
    reduces them in the opposite order, and gathers each one again if the plan reshards it after
    forward. With a schedule, units are gathered ahead as the schedule says.

    - If units are called inside others, backward gathers the outer unit before the inner ones when
      the outer unit uses its own leaves after it calls them. The schedule of a sharded function
      that has run with gradients knows that order, and knows the units for ``not_saved``.
    - A unit that forward calls several times is gathered and reduced as often; one that stays
      gathered is gathered once.
    - A unit that stays gathered is gathered once for several forwards, and not again for a
      recomputation. With ``reshard_after_backward=False`` it is gathered once for all
      micro-batches.
    - An all-reduce over the replicate axis follows when the next unit's reduction has started.
    - A unit with a number of ranks as ``reshard_after_forward`` is gathered again from so many.
    - The modules of a group are gathered with the first of them, and reduced with the last.

    Three kinds of units that forward calls several times are not covered: only some of the calls
    have gradients or are in a checkpoint; one checkpoint holds several of the calls; or one call is
    inside another.
    Nor are units inside a recomputed unit covered, if forward calls them several times, if a group
    joins them with units outside of it, or if they are recomputed themselves and the outer unit
    only adds their output to something, as a block with residuals does: backward reaches them
    before the outer unit runs again, which stops before them.

    Arguments:
        plan: the plan.
        order: the schedule (``sharded.schedule``; for a composition by hand, a schedule without
            prefetch), or names of the units in the order in which forward calls them, for
            ``fully_shard``'s default schedule. By default plan order.
        not_saved: units whose backward needs none of their parameters, and which are therefore not
            gathered again: an embedding alone, or a first linear layer whose input needs no
            gradient.
        recomputed: units that backward computes again, by ``fully_shard(..., remat=...)`` or
            ``torch.utils.checkpoint`` around or inside them. A tuple names the units that one
            checkpoint holds together, in the order of forward.
        micro_batches: number of micro-batches that ``accumulate`` runs.
        reduce: as in ``accumulate``. With ``"once"`` only the backward of the last micro-batch
            reduces, each unit once. With ``"shard_each"`` only that backward has all-reduces.
        cast: as in ``fully_shard``.
        forwards: how often the loss function calls the model, with the same shards and in the same
            order of units, before its backward.

    Returns:
        The events, equal to those that ``record_events`` records around the step.

    Raises:
        ValueError: ``order``, ``not_saved``, ``recomputed`` or ``reduce`` names a unit that the
            plan does not have; ``micro_batches`` or ``reduce`` is not valid for ``accumulate``; or
            ``forwards`` is not a positive whole number.

    Example:
        >>> import torch, funcshard as fs
        >>> plan = fs.make_plan({"a": torch.zeros(4), "b": torch.zeros(4)}, 2, units=["b"])
        >>> events = fs.predict_events(plan)
        >>> [(event.kind, event.unit) for event in events]  # doctest: +NORMALIZE_WHITESPACE
        [('all_gather', ''), ('all_gather', 'b'),
         ('all_gather', 'b'), ('reduce_scatter', 'b'), ('reduce_scatter', '')]
    """
    step = predict_step(
        plan, order, not_saved=not_saved, recomputed=recomputed, micro_batches=micro_batches, reduce=reduce, cast=cast,
        forwards=forwards,
    )  # fmt: skip
    return tuple(step_item for step_item in step if isinstance(step_item, Event))


def predict_step(
    plan: Plan,
    order: Sequence[str] | Schedule | None = None,
    *,
    not_saved: Iterable[str] = (),
    recomputed: Iterable[str | tuple[str, ...]] = (),
    micro_batches: int = 1,
    reduce: Reduce = "each",
    cast: ChooseCast | None = None,
    forwards: int = 1,
    reached: Sequence[Reached] | None = None,
) -> list[Event | Reached]:
    """Return the events of ``predict_events`` and the places in the step at which they start.

    Further arguments and errors are those of ``predict_events``.

    Arguments:
        reached: the places of one backward after its start, if they are known; then ``recomputed``
            does not matter. By default they follow from the schedule.
    """
    check_plan(plan)
    micro_batches = check_reduce(micro_batches, reduce)
    check_reduce_units(reduce, plan.units)
    forwards = check_count(
        "forwards",
        forwards,
        of="forwards",
        remedy="pass 1 if the loss function calls the model once",
    )
    for option, given_names in (("not_saved", not_saved), ("recomputed", recomputed)):
        if isinstance(given_names, str):
            raise TypeError(
                f"{option} must be a list of unit names; found the text {given_names!r}: pass [{given_names!r}]"
            )
    schedule = order if isinstance(order, Schedule) else make_schedule(plan, order)
    check_schedule(schedule, plan)
    checkpoints = [
        (checkpoint_units,) if isinstance(checkpoint_units, str) else tuple(checkpoint_units)
        for checkpoint_units in recomputed
    ]
    spared = frozenset(not_saved)
    # It raises for unknown names.
    make_schedule(plan, [*sorted(spared), *(name for names in checkpoints for name in names)])
    collectives = _Collectives(plan, cast)
    by_last = {names[-1]: names for names in _outermost(collectives.units, checkpoints) if names}
    step_items: list[Event | Reached] = []
    kept: set[str] = set()  # the units that stay gathered now
    for batch_index in range(micro_batches):
        last = batch_index == micro_batches - 1
        reductions = _Reductions(collectives, schedule, reduce, last=last, forwards=forwards)
        for _ in range(forwards):
            step_items += _forward(collectives, schedule, spared, kept)
        for _ in range(forwards):
            backward = _Backward(collectives, schedule, spared, kept)
            step_items += (
                backward.expected(by_last, reductions)
                if reached is None
                else backward.followed(reached, reductions)
            )
        step_items += reductions.late
        kept = {name for name in kept if not collectives.units[name].reshard_after_backward}
    return step_items


class _Collectives:
    """The collectives of units, worked out once for each.

    Arguments:
        plan: the plan.
        cast: as in ``predict_events``.

    Attributes:
        units: the plan's units by name.
        gathers: a function from a unit's name to its all-gathers.
        reductions: a function from a unit's name to the reductions of each buffer's gradient.
    """

    def __init__(self, plan: Plan, cast: ChooseCast | None) -> None:
        self.units = units = plan.units
        self.gathers = functools.cache(lambda name: _gathers(units[name], cast))
        self.reductions = functools.cache(lambda name: _reductions(units[name]))


def _forward(
    collectives: _Collectives, schedule: Schedule, spared: frozenset[str], kept: set[str]
) -> Iterator[Event | Reached]:
    units, gathers = collectives.units, collectives.gathers
    order = ForwardOrder(schedule)
    for name in schedule.order:
        yield Reached("forward", name)
        stays = not units[name].reshard_after_forward
        yield from gathers(name) if order.gather(name) and name not in kept else ()
        order.call(name, stays=stays)
        if stays and (collectives.reductions(name) or name not in spared):
            kept.add(name)
        for ahead in order.prefetch():
            yield from gathers(ahead) if ahead not in kept else ()


class _Backward:
    """The gathers of one backward.

    Arguments:
        collectives: the collectives of units.
        schedule: the schedule.
        spared: units whose backward needs none of their parameters.
        kept: the units that stay gathered.
    """

    def __init__(
        self, collectives: _Collectives, schedule: Schedule, spared: frozenset[str], kept: set[str]
    ) -> None:
        self._collectives = collectives
        self._names = tuple(dict.fromkeys(schedule.order))
        self._units = units = collectives.units
        self._gathers = gathers = collectives.gathers
        self._kept = kept
        self._early, self._late = (schedule.backward_prefetch == when for when in ("pre", "post"))
        self._expected = schedule.backward_order()
        self._again = {
            moment: name
            for moment, (moment_kind, name) in enumerate(self._expected)
            if moment_kind == "gather"
            and units[name].reshard_after_forward
            and name not in spared
            and gathers(name)
        }
        self._order = BackwardOrder(schedule, self._again)
        self._order.expect([(moment, moment) for moment in self._again])

    def expected(
        self, recomputed: Mapping[str, tuple[str, ...]], reductions: _Reductions
    ) -> Iterator[Event | Reached]:
        """Yield what backward does if it follows the schedule.

        Arguments:
            recomputed: the units of each checkpoint, by the last of them.
            reductions: the reductions of this backward.
        """
        around = _outer_units(self._units, self._names) if recomputed else {}
        inner_units: dict[str, list[str]] = {}  # of recomputed units
        for name, outer_units in around.items():
            for outer in recomputed.keys() & outer_units:
                inner_units.setdefault(outer, []).append(name)
        entered: set[str] = set()  # units around which backward needed before the units inside
        gathered_units: set[str] = set()  # units gathered for the use that backward is at
        yield from self._begin()
        for moment, (moment_kind, name) in enumerate(self._expected):
            # Note: a checkpoint computes its unit again before backward needs the units inside, and
            # inside it backward needs a unit when it reaches the output.
            inside = False
            for outer in [*around.get(name, ()), name]:
                inside = inside or outer in inner_units
                reached = outer in entered or outer in gathered_units
                if inside and not reached and (outer != name or outer in inner_units):
                    entered.add(outer)
                    yield Reached("need", outer)
                    yield from self._enter(
                        outer, recomputed.get(outer, ()), inner_units.get(outer, ())
                    )
            checkpoint = recomputed.get(name, ())
            if moment_kind == "gather":
                if name in entered:
                    continue
                yield Reached("need", name)
                if moment in self._again:
                    gathered_units.add(name)
                    yield from self._need(moment)
                    yield from self._recomputation(checkpoint[:-1])
                continue
            yield Reached("reduce", name)
            if checkpoint and name not in gathered_units | entered:
                yield from self._recompute_all(moment, checkpoint)
            gathered_units.discard(name)
            yield from self._reduce(name, moment, reductions)

    def _enter(
        self, outer: str, checkpoint: Sequence[str], inner_units: Sequence[str]
    ) -> Iterator[Event]:
        """Yield what backward does when it reaches the output of a unit with others inside."""
        if outer in self._again.values():
            yield from self._need_of(outer)
            yield from self._recomputation([*checkpoint[:-1], *inner_units])
        elif checkpoint:
            reduce_moment = self._expected.index(("reduce", outer))
            yield from self._recompute_all(reduce_moment, [*checkpoint, *inner_units])

    def _need_of(self, name: str) -> Iterator[Event]:
        """Yield what backward does where it needs a unit that forward calls once."""
        for use in [moment for moment, unit_name in self._again.items() if unit_name == name]:
            yield from self._need(use)

    def _recompute_all(self, moment: int, names: Sequence[str]) -> Iterator[Event]:
        yield from self._recomputation(names)
        if self._early and self._units[names[0]].reshard_after_forward:
            yield from self._prefetch(moment)

    def followed(
        self, reached: Sequence[Reached], reductions: _Reductions
    ) -> Iterator[Event | Reached]:
        """Yield what backward does at known places; it gathers ahead as the schedule says."""
        ends: dict[str, list[int]] = {}  # by unit: the moments at which its calls are reduced
        for moment, (place_kind, name) in enumerate(self._expected):
            if place_kind == "reduce":
                ends.setdefault(name, []).append(moment)
        uses = {
            end: moment
            for moment, name in self._again.items()
            for end in [_after(ends.get(name, ()), moment)]
        }
        yield from self._begin()
        for place in reached:
            yield place
            place_kind, name = place
            moments_left = ends.get(name, [])
            moment = moments_left[0] if moments_left else -1
            if place_kind == "reduce":
                del moments_left[:1]
                yield from self._reduce(name, moment, reductions)
            elif place_kind == "leave":
                del moments_left[:1]
            elif place_kind == "need" and moment in uses:
                yield from self._need(uses.pop(moment))
            elif place_kind == "again" or self._units[name].reshard_after_forward:
                yield from self._recomputation([name])

    def _begin(self) -> Iterator[Event | Reached]:
        yield Reached("backward", "")
        if self._early:
            yield from self._prefetch(-1, most=1)

    def _need(self, use: int) -> Iterator[Event]:
        yield from self._gathers_of(use) if self._order.gather(use) else ()
        self._order.reach(use)
        yield from self._prefetch(use) if self._early else ()

    def _reduce(self, name: str, moment: int, reductions: _Reductions) -> Iterator[Event]:
        unit = self._units[name]
        if self._late and unit.reshard_after_forward and self._collectives.reductions(name):
            yield from self._prefetch(moment)
        yield from reductions.add(name)

    def _gathers_of(self, use: int) -> Sequence[Event]:
        unit = self._units[self._again[use]]
        return _gathers_of_slices(unit) if unit.post_forward_ranks else self._gathers(unit.name)

    def _prefetch(self, moment: int, most: int | None = None) -> Iterator[Event]:
        for use in self._order.prefetch(moment, most=most):
            yield from self._gathers_of(use)

    def _recomputation(self, names: Sequence[str]) -> Iterator[Event]:
        for name in names:
            yield from self._gathers(name) if name not in self._kept else ()


def _outer_units(units: Mapping[str, UnitPlan], names: Iterable[str]) -> dict[str, list[str]]:
    """Return, for each of these units, those that it is inside of, from the outside inwards."""
    names = [*names]
    unit_of = {path: name for name in names for path in units[name].paths}
    outer_units: dict[str, list[str]] = {}
    for name in names:
        chains = [
            [unit_of[node] for node in tree.upwards(path) if unit_of.get(node, name) != name]
            for path in units[name].paths
        ]
        outer_units[name] = [
            outer for outer in reversed(chains[0]) if all(outer in chain for chain in chains)
        ]
    return outer_units


def _outermost(
    units: Mapping[str, UnitPlan], checkpoints: Sequence[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Return the units of each checkpoint, without those inside another of them."""
    return [
        tuple(name for name, outer in _outer_units(units, names).items() if not outer)
        for names in checkpoints
    ]


def _after(moments: Sequence[int], moment: int) -> int:
    return next((later_moment for later_moment in moments if later_moment > moment), -1)


class _Reductions:
    """The reductions of one backward.

    Arguments:
        collectives: the collectives of units.
        schedule: the schedule, which says in which order gradients come.
        reduce: when the gradients of each unit are reduced.
        last: whether this is the backward of the last micro-batch.
        forwards: how many forwards the backward is of.

    Attributes:
        late: reductions over further mesh axes, which follow when the next reduction over the first
            axis has started.
    """

    def __init__(
        self,
        collectives: _Collectives,
        schedule: Schedule,
        reduce: Reduce,
        *,
        last: bool,
        forwards: int,
    ) -> None:
        self.late: Sequence[Event] = []
        self._collectives = collectives
        self._reduce = reduce
        self._last = last
        # How many gradients of each unit are still to come.
        self._awaited = Counter(
            name
            for moment_kind, name in schedule.backward_order() * forwards
            if moment_kind == "reduce"
        )

    def add(self, name: str) -> Iterator[Event]:
        """Yield the reductions that start when the gradient of a unit has come."""
        self._awaited[name] -= 1
        for reduction in self._collectives.reductions(name):
            mode = self._mode(name, reduction)
            if mode == "once" and (self._awaited[name] > 0 or not self._last):
                continue
            yield from reduction[:1]
            yield from self.late
            self.late = reduction[1:] if mode != "shard_each" or self._last else ()

    def _mode(self, name: str, reduction: Sequence[Event]) -> str:
        """Return when the gradient of a buffer is reduced."""
        mode = unit_mode(self._reduce, name)
        if mode != "shard_each":
            return mode
        cut = bool(reduction) and reduction[0].kind == "reduce_scatter"
        return buffer_mode(mode, cut=cut, repeated=len(reduction) > cut)


def _gathers(unit: UnitPlan, cast: ChooseCast | None) -> list[Event]:
    """The all-gathers of a unit."""
    ranks = unit.mesh_shape[1]
    events = []
    if unit.sharded and ranks > 1:
        for buffer in unit.buffers:
            if buffer.numel and "shard" not in buffer.local:
                pair = cast_of(cast, unit, buffer)
                dtype, numel = unit.gathered_dtype(buffer), buffer.shard_numel
                if pair is not None:
                    sent = pair.pre_all_gather(
                        torch.zeros(numel, dtype=dtype_of(buffer.dtype), device="cpu")
                    )
                    dtype, numel = sent.dtype, sent.numel()
                events.append(
                    _event("all_gather", unit, buffer, dtype, numel * ranks, "shard", ranks)
                )
    return events


def _gathers_of_slices(unit: UnitPlan) -> list[Event]:
    """The all-gathers in backward of a unit that some ranks hold together after forward."""
    ranks = unit.post_forward_ranks
    assert ranks is not None, f"unit {unit.name}: nothing is cut into slices"
    return [
        _event(
            "all_gather",
            unit,
            buffer,
            unit.gathered_dtype(buffer),
            buffer.padded_numel,
            "shard",
            ranks,
        )
        for buffer in unit.buffers
        if buffer.numel and "shard" not in buffer.local
    ]


def _reductions(unit: UnitPlan) -> list[list[Event]]:
    """The reductions of each buffer that gets a gradient."""
    # Why reversed: backward reaches a unit's buffers last to first.
    buffers = [buffer for buffer in reversed(unit.buffers) if buffer.trainable and buffer.numel]
    return [_reduction(unit, buffer) for buffer in buffers]


def _reduction(unit: UnitPlan, buffer: BufferPlan) -> list[Event]:
    """The reductions of one buffer's gradient."""
    shard = unit.mesh_shape[1]
    dtype = unit.reduced_dtype(buffer)
    events = []
    if shard > 1 and "shard" not in buffer.local:
        reduction_kind = "reduce_scatter" if unit.sharded else "all_reduce"
        events.append(
            _event(reduction_kind, unit, buffer, dtype, buffer.padded_numel, "shard", shard)
        )
    for axis, ranks in (("replicate", unit.mesh_shape[0]), *unit.model_axes):
        if ranks > 1 and axis not in buffer.local:
            events.append(
                _event("all_reduce", unit, buffer, dtype, buffer.shard_numel, axis, ranks)
            )
    return events


def _event(
    kind: str,
    unit: UnitPlan,
    buffer: BufferPlan,
    dtype: torch.dtype,
    numel: int,
    axis: str,
    ranks: int,
) -> Event:
    return Event(
        kind, unit.name, buffer.key, dtype_name(dtype), numel * dtype.itemsize, axis, ranks
    )
