"""What a step will do: the collectives that follow from a plan, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from funcshard.events import Event
from funcshard.plan import BufferPlan, Plan, UnitPlan

__all__ = ["predict_events"]


def predict_events(plan: Plan, order: Sequence[str] | None = None, *, not_saved: Iterable[str] = ()) -> tuple[Event, ...]:
    """Return the collectives that one ``value_and_grad`` of a ``fully_shard``ed model issues on a rank, in order.

    The root is gathered first and reduced last; the units are gathered in ``order`` in forward, and in backward each is
    gathered again, if the plan reshards it after forward, and reduced, in the opposite order. An all-reduce over the
    replicate axis follows when the next unit's reduction has started.

    Arguments:
        plan: the plan.
        order: names of the units in the order in which forward calls them; by default plan order.
        not_saved: units whose backward needs none of their parameters (a unit that is one embedding), which are therefore
            not gathered again.

    Returns:
        The events, equal to what ``record_events`` records around the step.

    Raises:
        ValueError: ``order`` or ``not_saved`` names a unit that the plan does not have.

    Example:
        >>> import torch, funcshard as fs
        >>> plan = fs.make_plan({"a": torch.zeros(4), "b": torch.zeros(4)}, 2, units=["b"])
        >>> [(event.kind, event.unit) for event in fs.predict_events(plan)]  # doctest: +NORMALIZE_WHITESPACE
        [('all_gather', ''), ('all_gather', 'b'),
         ('all_gather', 'b'), ('reduce_scatter', 'b'), ('reduce_scatter', '')]
    """
    units = plan.units
    names = [name for name in units if name != ""] if order is None else list(order)
    for name in (*names, *not_saved):
        if name not in units or (name == "" and name in names):
            raise ValueError(f"the plan has no unit {name!r} to put in order; its units are {[n for n in units if n][:6]}")
    forward = ([units[""]] if "" in units else []) + [units[name] for name in names]
    spared = set(not_saved)

    def events() -> Iterator[Event]:
        for unit in forward:
            yield from _gathers(unit)
        late: list[Event] = []
        for unit in reversed(forward):
            if unit.reshard_after_forward and unit.name not in spared:
                yield from _gathers(unit)
            for buffer in _reduced(unit):
                first, *rest = _reduction(unit, buffer)
                yield first
                yield from late
                late = rest
        yield from late

    return tuple(events())


def _gathers(unit: UnitPlan) -> Iterator[Event]:
    ranks = unit.mesh_shape[1]
    if unit.sharded and ranks > 1:
        for buffer in unit.buffers:
            if buffer.numel:
                yield _event("all_gather", unit, buffer, buffer.padded_numel, "shard", ranks)


def _reduced(unit: UnitPlan) -> list[BufferPlan]:
    if max(unit.mesh_shape) == 1:
        return []
    # backward meets a unit's buffers last to first
    return [buffer for buffer in reversed(unit.buffers) if buffer.trainable and buffer.numel]


def _reduction(unit: UnitPlan, buffer: BufferPlan) -> list[Event]:
    replicate, shard = unit.mesh_shape
    events = []
    if shard > 1:
        kind = "reduce_scatter" if unit.sharded else "all_reduce"
        events.append(_event(kind, unit, buffer, buffer.padded_numel, "shard", shard))
    if replicate > 1:
        events.append(_event("all_reduce", unit, buffer, buffer.shard_numel, "replicate", replicate))
    return events


def _event(kind: str, unit: UnitPlan, buffer: BufferPlan, numel: int, axis: str, ranks: int) -> Event:
    return Event(kind, unit.name, buffer.key, buffer.dtype, numel * buffer.itemsize, axis, ranks)
