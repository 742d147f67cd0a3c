"""Compare the bytes that each unit sends in a step with the bound of its strategy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from funcshard import Event, Plan

__all__ = ["Row", "rows"]


class Row(NamedTuple):
    """The collectives of one unit in one step.

    Attributes:
        unit: name of the unit.
        calls: number of collectives.
        sent: bytes that each rank had to send.
        bound: the most bytes that the strategy allows: every all-gather and the reduction, once
            each.
    """

    unit: str
    calls: int
    sent: int
    bound: int


def rows(plan: Plan, events: Iterable[Event]) -> list[Row]:
    """Return one row for each unit.

    The bound of a unit is (all-gathers × numel × bytes of a parameter + numel × bytes of a reduced
    gradient) × (ranks − 1) / ranks, where numel includes the padding of the flat buffer.

    Raises:
        ValueError: a unit sent more than its bound.
    """
    recorded = list(events)
    _, ranks = plan.mesh_shape
    found = []
    for unit in plan.unit_list:
        bound = 0
        gathers = 2 if unit.reshard_after_forward else 1
        for buffer in unit.buffers:
            size = buffer.padded_numel * buffer.itemsize
            bound += (gathers + buffer.trainable) * size * (ranks - 1) // ranks
        mine = [event for event in recorded if event.unit == unit.name]
        sent = sum(event.traffic for event in mine)
        if sent > bound:
            raise ValueError(f"unit {unit.title!r} sent {sent} bytes a rank, which is more than its bound of {bound}")
        found.append(Row(unit.name, len(mine), sent, bound))
    return found
