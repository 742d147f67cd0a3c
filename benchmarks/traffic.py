"""What funcshard sends in a step, unit by unit, against the bound that its strategy allows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from funcshard import Event, Plan

__all__ = ["Row", "rows"]


class Row(NamedTuple):
    """One unit's collectives in one step, or those of units that share them.

    Attributes:
        unit: its name, or theirs.
        calls: how many collectives there were.
        sent: bytes that each rank had to send.
        bound: the most that its strategy allows: every gather and the reduction, once each.
    """

    unit: str
    calls: int
    sent: int
    bound: int


def rows(plan: Plan, events: Iterable[Event]) -> list[Row]:
    """Return each unit's row, one for the units of a joined run; raise ``ValueError`` where more was sent than the bound.

    The bound is (gathers × numel × bytes of a parameter + numel × bytes of a reduced gradient) × (ranks − 1) / ranks,
    where numel counts the padding of the flat buffer; that of a run is the sum of its units'.
    """
    recorded = list(events)
    _, ranks = plan.mesh_shape
    found = []
    joined = {name: run for run in plan.buckets for name in run}
    for names in dict.fromkeys(joined.get(name, (name,)) for name in plan.units):
        bound = 0
        for unit in (plan.units[name] for name in names):
            gathers = 2 if unit.reshard_after_forward else 1
            for buffer in unit.buffers:
                size = buffer.padded_numel * buffer.itemsize
                bound += (gathers + buffer.trainable) * size * (ranks - 1) // ranks
        mine = [event for event in recorded if event.unit is not None and set(event.unit.split(" + ")) <= set(names)]
        sent = sum(event.traffic for event in mine)
        title = " + ".join(names)
        if sent > bound:
            raise ValueError(f"unit {title or '(root)'!r} sent {sent} bytes a rank, which is more than its bound of {bound}")
        found.append(Row(title, len(mine), sent, bound))
    return found
