"""What funcshard sends in a step, unit by unit, against the bound that its strategy allows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from funcshard import Event, Plan

__all__ = ["Row", "rows"]


class Row(NamedTuple):
    """One unit's collectives in one step.

    Attributes:
        unit: its name.
        calls: how many collectives it took part in.
        sent: bytes that each rank had to send.
        bound: the most that its strategy allows: every gather and the reduction, once each.
    """

    unit: str
    calls: int
    sent: int
    bound: int


def rows(plan: Plan, events: Iterable[Event]) -> list[Row]:
    """Return each unit's row; raise ``ValueError`` where a unit sent more than the bound.

    The bound is (gathers × numel × bytes of a parameter + numel × bytes of a reduced gradient) × (ranks − 1) / ranks,
    where numel counts the padding of the flat buffer.
    """
    recorded = list(events)
    _, ranks = plan.mesh_shape
    found = []
    for unit in plan.unit_list:
        gathers = 2 if unit.reshard_after_forward else 1
        bound = 0
        for buffer in unit.buffers:
            size = buffer.padded_numel * buffer.itemsize
            bound += (gathers + buffer.trainable) * size * (ranks - 1) // ranks
        mine = [event for event in recorded if event.unit == unit.name]
        sent = sum(event.traffic for event in mine)
        if sent > bound:
            raise ValueError(f"unit {unit.title!r} sent {sent} bytes a rank, which is more than its bound of {bound}")
        found.append(Row(unit.name, len(mine), sent, bound))
    return found
