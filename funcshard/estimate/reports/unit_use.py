"""``UnitUse``: a report unit by unit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from funcshard._utils import table
from funcshard.estimate.walk import Step
from funcshard.plan import UnitPlan, fold_units

_NO_UNIT = "(no unit)"
_OF_STEP = ("loss", "optimizer")


@dataclass(frozen=True, slots=True)
class UnitUse:
    """The memory and time of a unit, or of equal units together.

    Attributes:
        title: name of the unit, or of the equal units.
        traffic: bytes that the rank sends in a step.
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


# The columns of tables by unit: title, number and its text.
COLUMNS: tuple[tuple[str, Callable[[UnitUse], Any], Callable[[Any], str]], ...] = (
    ("at the peak", lambda use: use.bytes, table.size),
    ("traffic", lambda use: use.traffic, table.size),
    ("compute", lambda use: use.compute, table.duration),
    ("collectives", lambda use: use.communication, table.duration),
)


def by_unit(report: Step, key: Callable[[UnitPlan], Hashable] | None = None) -> tuple[UnitUse, ...]:
    """Return the use of each unit, in plan order; equal units are one.

    A last row has the loss, the optimizer, and the collectives that belong to no unit.

    Arguments:
        key: a function of a unit; units for which it differs are not equal.
    """
    units = report.plan.units
    traffic = Counter[str]()
    for event in report.events:
        unit_name = _NO_UNIT if event.unit is None else event.unit
        traffic[unit_name] += event.traffic
    compute: defaultdict[str, float] = defaultdict(float)
    communication: defaultdict[str, float] = defaultdict(float)
    for span in report.spans:
        # Note: spans of the loss and the optimizer name no unit, and neither does the root of a
        # plan that has no root unit.
        is_whole = span.unit == "" and (span.what in _OF_STEP or "" not in units)
        seconds = compute if span.lane == "compute" else communication
        seconds[_NO_UNIT if is_whole else span.unit] += span.seconds
    recomputed_names = recomputed_units(report)
    unit_groups = fold_units(
        units.values(), key=lambda unit: (unit.name in recomputed_names, key and key(unit))
    )
    title_by_names = {group.names: group.title for group in unit_groups}
    other_names = dict.fromkeys((*traffic, *compute, *communication))
    title_by_names.update({(name,): name for name in other_names if name not in units})
    unit_uses = []
    for names, title in title_by_names.items():
        unit_memory = Counter[str]()
        for name in names:
            unit_memory.update(report.unit_memory.get(name, {}))
        unit_uses.append(
            UnitUse(
                title=title,
                names=names,
                memory=dict(unit_memory),
                traffic=sum(traffic[name] for name in names),
                compute=sum(compute[name] for name in names),
                communication=sum(communication[name] for name in names),
            )
        )
    return tuple(unit_uses)


def recomputed_units(report: Step) -> set[str]:
    """Return the names of the units with modules that backward recomputes."""
    remat: Any = report.options.get("remat") or ()
    recomputed_modules: set[str] = set()
    # Note: one name stands alone, and a group is a tuple of the names of its members.
    for names in (remat,) if isinstance(remat, str) else remat:
        recomputed_modules.update((names,) if isinstance(names, str) else names)
    return {
        unit.name
        for unit in report.plan.unit_list
        if recomputed_modules.intersection((unit.name, *unit.members))
    }
