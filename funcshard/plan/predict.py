"""Predict the collectives of a step from the plan and the schedule alone.

Under transforms of ``torch.func`` nothing is gathered ahead, and units stay gathered. So an
operator such as ``hvp`` is a few sweeps over the units, and ``SWEEPS`` lists what each of them
communicates.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from funcshard._utils import tree
from funcshard._utils.options import check_choice
from funcshard._utils.tensors import dtype_name
from funcshard.plan.events import Event
from funcshard.plan.plan import Plan, check_plan
from funcshard.plan.schedule import (
    Accumulation,
    BackwardOrder,
    ForwardOrder,
    Schedule,
    buffer_mode,
    check_accumulate,
    check_reduce_units,
    check_schedule,
    make_schedule,
    unit_mode,
    unit_names,
)
from funcshard.plan.unit_plan import BufferPlan, ChooseCast, UnitPlan, cast_of

Transform = Literal["grad", "vjp", "jvp", "hvp", "gnvp", "linearize"]

# What is gathered before a unit computes: its values, their tangents, or each buffer's values and
# then its tangents. What is reduced after it: a gradient of each buffer, or its tangent too.
_Item = Literal["values", "tangents", "duals", "gradients", "dual gradients"]


class _Sweep(NamedTuple):
    """One pass over all units.

    Attributes:
        backward: whether it runs from the last unit to the first.
        plain: what a unit communicates when the pass is at it.
        recomputed: the same of a checkpoint.
    """

    backward: bool
    plain: tuple[_Item, ...]
    recomputed: tuple[_Item, ...]


_VALUES = _Sweep(False, ("values",), ("values",))
_DUALS = _Sweep(False, ("duals",), ("duals",))
_PULLBACK = _Sweep(True, ("gradients",), ("values", "gradients"))
_DUAL_PULLBACK = _Sweep(True, ("dual gradients",), ("duals", "dual gradients"))
# The pullback of values alone; a checkpoint has kept what it needs for both.
_PULLBACK_OF_DUALS = _Sweep(True, ("gradients",), ("duals", "gradients"))
# The pullback of a pullback, which is linear: it needs no values but those that a checkpoint freed.
_PUSH = _Sweep(False, ("tangents",), ("values", "gradients", "tangents"))

SWEEPS: Mapping[Transform, tuple[_Sweep, ...]] = {
    "grad": (_VALUES, _PULLBACK),
    "vjp": (_VALUES, _PULLBACK),
    "jvp": (_DUALS,),
    "hvp": (_DUALS, _DUAL_PULLBACK),
    "gnvp": (_DUALS, _PULLBACK_OF_DUALS),
    "linearize": (_VALUES, _PULLBACK, _PUSH),
}


class Reached(NamedTuple):
    """A place that the step has reached, just before the collectives that start there.

    Attributes:
        what: ``"forward"``: forward calls the unit; ``"backward"``: forward is over; ``"need"``:
            backward needs the unit's leaves; ``"again"``: a checkpoint calls the unit again;
            ``"reduce"``: its gradients are complete; ``"leave"``: backward leaves a call without
            gradients.
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
    accumulate: int | Accumulation = 1,
    cast: ChooseCast | None = None,
    transform: Transform | None = None,
) -> tuple[Event, ...]:
    """Predict, in order, the collectives of one ``value_and_grad`` of a sharded model on a rank.

    With ``transform``, predict those of ``fs.hvp`` or of another operator instead.

    The root is gathered first and reduced last. Forward gathers the units in ``order``. Backward
    reduces them in the opposite order, and gathers each one again if the plan reshards it after
    forward. With a schedule, units are gathered ahead as the schedule says.

    - If your model calls units inside others, backward may gather the outer one first. Pass
      ``sharded.schedule`` of a function that has run with gradients: it knows that order, and the
      units for ``not_saved``.
    - A unit that forward calls several times is gathered and reduced each time.
    - A unit that stays gathered is gathered once for several forwards, and not again for a
      recomputation; with ``reshard_after_backward=False`` once for all micro-batches.
    - An all-reduce over the replicate axis follows when the next unit's reduction has started.
    - The modules of a group are gathered with the first of them, and reduced with the last.

    It doesn't cover units that forward calls several times if only some of the calls have gradients
    or are in a checkpoint, if a checkpoint holds several of the calls, or if one call is inside
    another. Nor does it cover units inside a recomputed unit, if forward calls them several times,
    if a group joins them with units outside of it, or if they are recomputed too and the outer unit
    only adds their output to something.

    Arguments:
        plan: the plan.
        order: the schedule (``sharded.schedule``; for a composition by hand, a schedule without
            prefetch), or names of the units in the order in which forward calls them, for
            ``fully_shard``'s default schedule. By default plan order.
        not_saved: units that are not gathered again because their backward needs no parameter: an
            embedding alone, or a first linear layer whose input needs no gradient.
        recomputed: units that backward computes again, by ``fully_shard(..., remat=...)`` or
            ``torch.utils.checkpoint`` around or inside them. A tuple names the units that one
            checkpoint holds together, in the order of forward.
        accumulate: number of micro-batches, or an ``Accumulation``.
        cast: as in ``fully_shard``.
        transform: ``"grad"``, ``"jvp"``, ``"hvp"``, ``"gnvp"``, ``"vjp"`` with one call of its
            pullback, or ``"linearize"`` with one call of its ``f_jvp``: that operator by the shards
            of a function that calls every unit once. Checkpoints may not hold others.

    Returns:
        The events, equal to those that ``record_events`` records around the step.

    Raises:
        ValueError: an argument names a unit that the plan does not have; or ``transform`` is not
            one of these, or beside several micro-batches or forwards.

    Example:
        >>> import torch, funcshard as fs
        >>> plan = fs.make_plan({"a": torch.zeros(4), "b": torch.zeros(4)}, 2, units=["b"])
        >>> events = fs.predict_events(plan)
        >>> [(event.kind, event.unit) for event in events]  # doctest: +NORMALIZE_WHITESPACE
        [('all_gather', ''), ('all_gather', 'b'),
         ('all_gather', 'b'), ('reduce_scatter', 'b'), ('reduce_scatter', '')]
    """
    accumulation = check_accumulate(accumulate)
    check_transform(transform, accumulation)
    step = _Step(
        plan,
        order,
        not_saved=not_saved,
        recomputed=recomputed,
        accumulation=accumulation,
        cast=cast,
    )
    if transform is None:
        return tuple(item for item in step.run() if isinstance(item, Event))
    return tuple(step.derivative(transform))


def check_transform(transform: Any, accumulation: Accumulation) -> None:
    """Raise unless ``transform`` is an operator, and its function runs once."""
    check_choice("transform", transform, [*SWEEPS, None])
    micro_batches, forwards = accumulation.micro_batches, accumulation.forwards
    if transform is not None and (micro_batches != 1 or forwards != 1):
        raise ValueError(
            f"transform={transform!r} is of a function that runs once; found "
            f"micro_batches={micro_batches} and forwards={forwards}: leave accumulate out"
        )


def predict_step(
    plan: Plan,
    schedule: Schedule,
    reached: Sequence[Reached],
    *,
    not_saved: Iterable[str],
    accumulation: Accumulation,
) -> list[Event | Reached]:
    """Return the events of a step whose backward is known, and the places at which they start.

    Arguments:
        reached: the places of one backward after its start.
    """
    step = _Step(plan, schedule, not_saved=not_saved, accumulation=accumulation)
    return list(step.run(reached))


class _Step:
    """One step, and the state of the micro-batch that runs.

    A *moment* of backward is an index into the schedule's ``backward_order``. A *use* is the moment
    of a gather that happens.
    """

    def __init__(
        self,
        plan: Plan,
        order: Sequence[str] | Schedule | None,
        *,
        not_saved: Iterable[str],
        recomputed: Iterable[str | tuple[str, ...]] = (),
        accumulation: Accumulation,
        cast: ChooseCast | None = None,
    ) -> None:
        check_plan(plan)
        self._units = units = plan.units
        self._accumulation = accumulation
        if isinstance(accumulation.reduce, Mapping):
            check_reduce_units(accumulation.reduce, units)
        schedule = order if isinstance(order, Schedule) else make_schedule(plan, order)
        check_schedule(schedule, plan)
        self._schedule = schedule
        self._moments = schedule.backward_order()
        self._early = schedule.backward_prefetch == "pre"
        self._late = schedule.backward_prefetch == "post"
        self._spared = unit_names(plan, "not_saved", not_saved)
        # Why caches: forward and backward may come to a unit many times.
        self._gathers = functools.cache(
            lambda name: _gathers(units[name], units[name].mesh_shape[1], cast)
        )
        self._reductions = functools.cache(
            lambda name: _reductions(units[name], unit_mode(accumulation.reduce, name))
        )
        # Backward gathers again what forward freed, unless it needs no leaf of the unit.
        self._uses = {
            moment_index: name
            for moment_index, (moment_kind, name) in enumerate(self._moments)
            if moment_kind == "gather"
            and units[name].reshard_after_forward
            and name not in self._spared
            and self._gathers(name)
        }
        self._kept: set[str] = set()  # the units that stay gathered now
        # The units of each checkpoint by the last of them, without those inside another of them.
        self._checkpoints: dict[str, list[str]] = {}
        # A text is a list of texts too, so it has to be refused before the loop.
        if isinstance(recomputed, str):
            unit_names(plan, "recomputed", recomputed)
        for names in recomputed:
            names = unit_names(
                plan, "recomputed", (names,) if isinstance(names, str) else names
            )
            outermost = [
                name
                for name, outer_unit in _outer_units(units, names).items()
                if not outer_unit
            ]
            if outermost:
                self._checkpoints[outermost[-1]] = outermost
        self._outer: dict[str, list[str]] = {}
        self._inner: dict[str, list[str]] = {}  # the units inside each recomputed unit
        # Why only then: it takes a walk over all units, and most models recompute nothing.
        if self._checkpoints:
            self._outer = _outer_units(units, schedule.order)
        for name, outer_units in self._outer.items():
            for outer_unit in self._checkpoints.keys() & outer_units:
                self._inner.setdefault(outer_unit, []).append(name)

    def derivative(self, transform: Transform) -> Iterator[Event]:
        """Yield what an operator does."""
        checkpoint_of = {
            unit_name: last_unit
            for last_unit, checkpoint_units in self._checkpoints.items()
            for outer_unit in checkpoint_units
            for unit_name in (outer_unit, *self._inner.get(outer_unit, ()))
        }
        # The units that are computed together, by the last one of their checkpoint.
        stretches: dict[str, list[str]] = {}
        for unit_name in self._schedule.order:
            stretches.setdefault(checkpoint_of.get(unit_name, unit_name), []).append(
                unit_name
            )
        for sweep in SWEEPS[transform]:
            for last_unit in reversed(stretches) if sweep.backward else stretches:
                is_recomputed = last_unit in self._checkpoints
                for item in sweep.recomputed if is_recomputed else sweep.plain:
                    yield from self._swept(item, stretches[last_unit])

    def _swept(self, item: _Item, names: Sequence[str]) -> Iterator[Event]:
        """Yield what one part of a sweep communicates for some units."""
        if item in ("gradients", "dual gradients"):
            copies = 2 if item == "dual gradients" else 1
            for unit_name in reversed(names):
                for _, buffer_events in self._reductions(unit_name):
                    yield from [*buffer_events] * copies
            return
        for unit_name in names:
            unit = self._units[unit_name]
            trainable = {buffer.key for buffer in unit.buffers if buffer.trainable}
            # Why without a cast: tangents are no parameters, and travel as they are.
            plain_gathers = _gathers(unit, unit.mesh_shape[1])
            for values, tangents in zip(
                self._gathers(unit_name), plain_gathers, strict=True
            ):
                if item != "tangents":
                    yield values
                if item != "values" and tangents.buffer in trainable:
                    yield tangents

    def run(self, reached: Sequence[Reached] | None = None) -> Iterator[Event | Reached]:
        """Yield what the step does, following the places of a backward if they are known."""
        for batch_index in range(self._accumulation.micro_batches):
            self._last = batch_index == self._accumulation.micro_batches - 1
            # How many gradients of each unit are still to come.
            self._awaited = Counter(
                unit_name
                for moment_kind, unit_name in self._moments * self._accumulation.forwards
                if moment_kind == "reduce"
            )
            # Reductions along further mesh axes, which follow when the next unit's reduction along
            # the first axis has started.
            self._late_reductions: Sequence[Event] = ()
            for _ in range(self._accumulation.forwards):
                yield from self._forward()
            for _ in range(self._accumulation.forwards):
                yield Reached("backward", "")
                # Each backward of a micro-batch begins with nothing gathered ahead.
                self._order = BackwardOrder(self._schedule)
                self._order.uses = [(use, use, name) for use, name in self._uses.items()]
                if self._early:
                    yield from self._prefetch(-1, most=1)
                yield from self._expected() if reached is None else self._followed(reached)
            yield from self._late_reductions
            self._kept = {
                unit_name
                for unit_name in self._kept
                if not self._units[unit_name].reshard_after_backward
            }

    def _forward(self) -> Iterator[Event | Reached]:
        order = ForwardOrder(self._schedule)
        for unit_name in self._schedule.order:
            yield Reached("forward", unit_name)
            stays = not self._units[unit_name].reshard_after_forward
            # Note: the order has to know of kept units too; only their collectives do not happen.
            gathers, _, ahead_units = order.call(unit_name, stays=stays)
            if gathers and unit_name not in self._kept:
                yield from self._gathers(unit_name)
            # Note: as ``GradReducer.keep``, which keeps no unit that backward won't need.
            if stays and (self._reductions(unit_name) or unit_name not in self._spared):
                self._kept.add(unit_name)
            yield from self._recompute(ahead_units)

    def _expected(self) -> Iterator[Event]:
        """Yield what backward does if it follows the schedule."""
        # Units that backward needed before the units inside them, and units that are gathered for
        # the use that backward is at.
        entered_units: set[str] = set()
        gathered_units: set[str] = set()
        for moment_index, (moment_kind, unit_name) in enumerate(self._moments):
            # Note: a checkpoint computes its unit again before backward needs the units inside, and
            # inside it backward needs a unit when it reaches the output.
            is_inside = False
            for outer_unit in [*self._outer.get(unit_name, ()), unit_name]:
                is_inside = is_inside or outer_unit in self._inner
                reached = outer_unit in entered_units or outer_unit in gathered_units
                if (
                    is_inside
                    and not reached
                    and (outer_unit != unit_name or outer_unit in self._inner)
                ):
                    entered_units.add(outer_unit)
                    uses = [use for use, name in self._uses.items() if name == outer_unit]
                    yield from self._reach(
                        outer_unit, uses, self._inner.get(outer_unit, [])
                    )
            if moment_kind == "reduce":
                # A checkpoint runs again even if backward needs none of the unit's own leaves.
                if unit_name not in gathered_units and unit_name not in entered_units:
                    yield from self._reach(unit_name, [], [], moment_index)
                gathered_units.discard(unit_name)
                yield from self._reduce(unit_name, moment_index)
            elif moment_index in self._uses and unit_name not in entered_units:
                gathered_units.add(unit_name)
                yield from self._reach(unit_name, [moment_index], [])

    def _reach(
        self, name: str, uses: Sequence[int], inner: list[str], moment: int | None = None
    ) -> Iterator[Event]:
        """Yield what backward does when it reaches the output of a unit.

        Arguments:
            name: the unit.
            uses: its uses that backward needs.
            inner: the units inside it that a checkpoint computes again.
            moment: the moment that backward is at; by default that of the unit's first reduction.
        """
        for use in uses:
            yield from self._need(use)
        checkpoint_units = self._checkpoints.get(name, [])
        if uses:
            yield from self._recompute(checkpoint_units[:-1] + inner)
        elif checkpoint_units:
            yield from self._recompute(checkpoint_units + inner)
            # Note: no use of the unit is reached, so backward prefetches from the moment itself.
            if self._early and self._units[checkpoint_units[0]].reshard_after_forward:
                if moment is None:
                    moment = self._moments.index(("reduce", name))
                yield from self._prefetch(moment)

    def _followed(self, reached: Sequence[Reached]) -> Iterator[Event | Reached]:
        """Yield what backward does at known places."""
        # By unit: the moments at which its calls are reduced.
        reduce_moments: dict[str, list[int]] = {}
        for moment_index, (moment_kind, unit_name) in enumerate(self._moments):
            if moment_kind == "reduce":
                reduce_moments.setdefault(unit_name, []).append(moment_index)
        # The call that a use is of: the one whose gradients are complete next.
        uses = {
            next((end for end in reduce_moments.get(unit_name, ()) if end > use), -1): use
            for use, unit_name in self._uses.items()
        }
        for reached_place in reached:
            yield reached_place
            moment_kind, unit_name = reached_place
            unit_ends = reduce_moments.get(unit_name, [])
            moment_index = unit_ends[0] if unit_ends else -1
            if moment_kind == "reduce":
                del unit_ends[:1]
                yield from self._reduce(unit_name, moment_index)
            elif moment_kind == "leave":
                del unit_ends[:1]
            elif moment_kind == "need" and moment_index in uses:
                yield from self._need(uses.pop(moment_index))
            # A second need of a call is that of a checkpoint.
            elif moment_kind == "again" or self._units[unit_name].reshard_after_forward:
                yield from self._recompute([unit_name])

    def _need(self, use: int) -> Iterator[Event]:
        # Note: reached before prefetching, so that the use itself is not counted as ahead.
        if self._order.reach(use):
            yield from self._gathers_of(use)
        if self._early:
            yield from self._prefetch(use)

    def _reduce(self, name: str, moment: int) -> Iterator[Event]:
        reductions = self._reductions(name)
        # Backward prefetch "post": the unit has computed its gradients now.
        if self._late and self._units[name].reshard_after_forward and reductions:
            yield from self._prefetch(moment)
        # A unit that is called twice has two gradients, and "once" reduces their sum.
        self._awaited[name] -= 1
        for reduce_mode, events in reductions:
            if reduce_mode == "once" and (self._awaited[name] > 0 or not self._last):
                continue
            yield from events[:1]
            yield from self._late_reductions
            self._late_reductions = (
                events[1:] if reduce_mode != "shard_each" or self._last else ()
            )

    def _prefetch(self, moment: int, most: int | None = None) -> Iterator[Event]:
        for use in self._order.prefetch(moment, most=most):
            yield from self._gathers_of(use)

    def _gathers_of(self, use: int) -> Sequence[Event]:
        unit = self._units[self._uses[use]]
        if unit.post_forward_ranks:
            # Why no cast: the slices that ranks keep after forward are of the gathered buffer.
            return _gathers(unit, unit.post_forward_ranks)
        return self._gathers(unit.name)

    def _recompute(self, names: Iterable[str]) -> Iterator[Event]:
        for unit_name in names:
            if unit_name not in self._kept:
                yield from self._gathers(unit_name)


def _outer_units(
    units: Mapping[str, UnitPlan], names: Iterable[str]
) -> dict[str, list[str]]:
    """Return, for each of these units, those around it, from the outside inwards."""
    names = dict.fromkeys(names)
    # A group has several paths, each with units around it.
    unit_of = {path: unit_name for unit_name in names for path in units[unit_name].paths}
    outer_units: dict[str, list[str]] = {}
    for unit_name in names:
        chains = [
            [
                unit_of[node]
                for node in tree.upwards(path)
                if unit_of.get(node, unit_name) != unit_name
            ]
            for path in units[unit_name].paths
        ]
        # A group is inside a unit that holds all of its modules.
        outer_units[unit_name] = [
            outer_unit
            for outer_unit in reversed(chains[0])
            if all(outer_unit in chain for chain in chains)
        ]
    return outer_units


def _gathers(unit: UnitPlan, ranks: int, cast: ChooseCast | None = None) -> list[Event]:
    events: list[Event] = []
    if ranks == 1 or not unit.sharded:
        return events
    for buffer in unit.buffers:
        if not buffer.numel or "shard" in buffer.local:
            continue
        # Note: of packed leaves no slices are kept, so all ranks send their bytes again.
        gather_ranks = ranks if buffer.packing is None else unit.mesh_shape[1]
        # Low precision travels: the shard is cast before the gather.
        comm_dtype, buffer_numel = unit.dtypes(buffer).gathered, buffer.padded_numel
        cast_pair = cast_of(cast, unit, buffer)
        if cast_pair is not None:
            # What the pair sends for a shard, only the pair knows.
            leaf_dtype = buffer.shard_dtype
            shard = torch.zeros(buffer.shard_numel, dtype=leaf_dtype, device="cpu")
            sent_data = cast_pair.pre_all_gather(shard)
            comm_dtype, buffer_numel = sent_data.dtype, sent_data.numel() * ranks
        events.append(
            _event(
                "all_gather", unit, buffer, comm_dtype, buffer_numel, "shard", gather_ranks
            )
        )
    return events


def _reductions(unit: UnitPlan, unit_choice: str) -> list[tuple[str, list[Event]]]:
    """The reductions of each buffer that gets a gradient, and when they happen."""
    reductions = []
    # Why reversed: backward reaches a unit's buffers last to first.
    for buffer in reversed(unit.buffers):
        if buffer.trainable and buffer.numel:
            events = _reduction(unit, buffer)
            # An all-reduce over the shard axis, of copies, is no cut.
            cut = [event.kind for event in events].count("reduce_scatter")
            reduce_mode = buffer_mode(unit_choice, cut=cut > 0, repeated=len(events) > cut)
            reductions.append((reduce_mode, events))
    return reductions


def _reduction(unit: UnitPlan, buffer: BufferPlan) -> list[Event]:
    comm_dtype, mesh_axes = unit.dtypes(buffer).reduced, unit.mesh_axes
    events = []
    # Why shard first: what travels along the other axes is then a shard.
    for axis in dict.fromkeys(("shard", "replicate", *mesh_axes)):
        if mesh_axes[axis] == 1 or axis in buffer.local:
            continue
        reduction_kind, buffer_numel = "all_reduce", buffer.shard_numel
        if axis == "shard" and unit.sharded:
            reduction_kind, buffer_numel = "reduce_scatter", buffer.padded_numel
        events.append(
            _event(
                reduction_kind,
                unit,
                buffer,
                comm_dtype,
                buffer_numel,
                axis,
                mesh_axes[axis],
            )
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
        kind=kind,
        unit=unit.name,
        buffer=buffer.key,
        dtype=dtype_name(dtype),
        bytes=numel * dtype.itemsize,
        axis=axis,
        ranks=ranks,
    )
