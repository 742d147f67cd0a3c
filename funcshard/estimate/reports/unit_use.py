"""The memory, the traffic and the time of a report, unit by unit, with equal units as one row."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from funcshard.estimate.walk import Step
from funcshard.plan import UnitPlan, fold_units

_NO_UNIT = "(no unit)"
_OF_STEP = ("loss", "optimizer")


@dataclass(frozen=True, slots=True)
class UnitUse:
    """The use that a unit, or equal units together, make of memory and time.

    Attributes:
        title: name of the unit, or of the equal units.
        names: names of the units.
        memory: bytes by category at the report's peak; the sum over the units.
        traffic: bytes that the rank sends for the units in one step.
        compute: seconds that the rank computes for them in one step.
        communication: seconds that their collectives take, hidden or not.
    """

    title: str
    names: tuple[str, ...]
    memory: Mapping[str, int]
    traffic: int
    compute: float
    communication: float

    @property
    def bytes(self) -> int:
        """Bytes of all categories at the peak."""
        return sum(self.memory.values())


def by_unit(report: Step, key: Callable[[UnitPlan], Hashable] | None = None) -> tuple[UnitUse, ...]:
    """Return the use of each unit, in plan order; equal units are one.

    Units are equal as in ``fold_units``, and if both are computed again in backward, or neither.
    A last row has the loss, the optimizer, and the collectives that belong to no unit.

    Arguments:
        report: the report.
        key: a function of a unit; units for which it differs are not equal.
    """
    traffic: defaultdict[str, int] = defaultdict(int)
    for event in report.events:
        traffic[_NO_UNIT if event.unit is None else event.unit] += event.traffic
    compute: defaultdict[str, float] = defaultdict(float)
    communication: defaultdict[str, float] = defaultdict(float)
    for span in report.spans:
        is_whole = span.unit == "" and (span.what in _OF_STEP or "" not in report.plan.units)
        seconds = compute if span.lane == "compute" else communication
        seconds[_NO_UNIT if is_whole else span.unit] += span.seconds
    recomputed_names = recomputed_units(report)
    groups = fold_units(
        report.plan.unit_list, key=lambda unit: (unit.name in recomputed_names, key and key(unit))
    )
    unit_rows = [(group.title, group.names) for group in groups]
    known_units = {*report.plan.units}
    unit_rows += [
        (name, (name,))
        for name in dict.fromkeys((*traffic, *compute, *communication))
        if name not in known_units
    ]

    def use(title: str, names: tuple[str, ...]) -> UnitUse:
        memory: defaultdict[str, int] = defaultdict(int)
        for category, size in itertools.chain.from_iterable(
            report.unit_memory.get(name, {}).items() for name in names
        ):
            memory[category] += size
        seconds = [sum(times[name] for name in names) for times in (compute, communication)]
        return UnitUse(title, names, dict(memory), sum(traffic[name] for name in names), *seconds)

    return tuple(use(title, names) for title, names in unit_rows)


def recomputed_units(report: Step) -> set[str]:
    """Return the names of the units of which backward computes modules again."""
    remat = report.options.get("remat") or ()
    entries: Iterable[object] = ()
    if isinstance(remat, Iterable):
        entries = (remat,) if isinstance(remat, str) else remat
    nested = ((name,) if isinstance(name, str) else name for name in entries)
    modules = {str(name) for names in nested if isinstance(names, Iterable) for name in names}
    return {
        unit.name
        for unit in report.plan.unit_list
        if modules.intersection((unit.name, *unit.members))
    }
