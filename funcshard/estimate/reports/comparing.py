"""``compare``: two reports side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from funcshard._utils import table
from funcshard._utils.table import Bullets, Part, Shown, Table
from funcshard.estimate.reports.differences import differences_between
from funcshard.estimate.reports.report import Report, moment_text
from funcshard.estimate.reports.unit_use import (
    COLUMNS,
    UnitUse,
    by_unit,
    recomputed_units,
)
from funcshard.plan import UnitPlan, unit_class


@dataclass(frozen=True, slots=True)
class UnitPair:
    """The use of a unit, or of equal units together, in two reports.

    Attributes:
        before: its use in the first report; ``None`` if the plan has no such unit.
    """

    before: UnitUse | None
    after: UnitUse | None

    def __post_init__(self) -> None:
        assert self.before or self.after, "a pair has a unit"

    @property
    def title(self) -> str:
        use = self.after or self.before
        assert use is not None, "checked above"
        return use.title

    def of(self, number: Callable[[UnitUse], Any]) -> tuple[Any, Any]:
        return number(self.before) if self.before else 0, number(self.after) if self.after else 0


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Shown):
    """Two reports side by side; made by ``compare``.

    Attributes:
        before: the first report.
        after: the second report.
        units: the use of each unit in both; equal units are one.
        changes: the differences of plans, options and profiles, as clauses.
    """

    before: Report
    after: Report
    units: tuple[UnitPair, ...]
    changes: tuple[str, ...]

    def _parts(self) -> list[Part]:
        both = self.before, self.after
        place_before, place_after = (moment_text(report.peak_moment) for report in both)
        if place_after != place_before:
            place_after = f"{place_after} instead of the {place_before}"
        memory_rows = _moves([report.by_category for report in both], table.size)
        time_rows = _moves([_times(report) for report in both], table.duration)
        # Note: phases overlap with waits, so the times of a step are not the sum of the rows.
        time_total = _row("total", self.before.step_time, self.after.step_time, table.duration)
        traffic_rows = _moves([_traffic(report) for report in both], table.size)
        header = ["", "before", "after", "±"]
        return [
            Bullets("Changes", self.changes or ("none",)),
            self._table(),
            Table(f"Memory at the peak, in the {place_after}", header, *memory_rows),
            Table("Time of a step", header, time_rows[0], time_total),
            Table("Traffic of a rank in a step", header, *traffic_rows),
        ]

    def _table(self) -> Table:
        header, rows, total = ["unit"], [[pair.title] for pair in self.units], ["total"]
        for title, number, text in COLUMNS:
            header += [title, "±"]
            number_pairs = [pair.of(number) for pair in self.units]
            for row, (old, new) in zip(rows, number_pairs, strict=True):
                row += _cells(old, new, text)
            total += _cells(
                sum(old for old, _ in number_pairs), sum(new for _, new in number_pairs), text
            )
        plan_names = [report.plan.fingerprint() for report in (self.after, self.before)]
        title = f"Plan {plan_names[0]} compared with plan {plan_names[1]}"
        return Table(f"{title}; a row n × has the sum over n equal units", header, rows, total)


def compare(before: Report, after: Report) -> Comparison:
    """Compare two reports: what changed, and how memory, time and traffic moved.

    Arguments:
        before: the first report.
        after: the second report.

    Returns:
        The comparison, which you can print.

    Raises:
        TypeError: an argument is no report.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> apply, params, buffers = fs.make_functional(net)
        >>> profile = fs.profile(apply, params, buffers, torch.zeros(8, 64))
        >>> both = ["full_shard", "no_shard"]
        >>> plans = [fs.make_plan(params, 8, units=["0", "1"], strategy=each) for each in both]
        >>> found = fs.compare(*(fs.estimate(profile, plan) for plan in plans))
        >>> found.changes
        ('all units have the strategy no_shard instead of full_shard',)
    """
    for name, report in (("before", before), ("after", after)):
        if not isinstance(report, Report):
            raise TypeError(
                f"{name} must be a Report that estimate returned; found {type(report).__name__}"
            )
    return Comparison(before, after, _pairs(before, after), differences_between(before, after))


def _pairs(before: Report, after: Report) -> tuple[UnitPair, ...]:
    both_units = before.plan.units, after.plan.units
    recomputed_names = recomputed_units(before), recomputed_units(after)
    # Note: units are folded only if they are equal in both reports, so that rows match.
    known_classes: dict[str, Hashable] = {
        name: tuple(
            (unit_class(plan_units[name]), name in names)
            for plan_units, names in zip(both_units, recomputed_names, strict=True)
        )
        for name in both_units[0].keys() & both_units[1].keys()
    }

    def key(unit: UnitPlan) -> Hashable:
        return known_classes.get(unit.name)

    old, new = ({use.names: use for use in by_unit(report, key)} for report in (before, after))
    return tuple(UnitPair(old.get(names), new.get(names)) for names in dict.fromkeys((*new, *old)))


def _cells(old: Any, new: Any, text: Callable[[Any], str]) -> list[str]:
    return [text(new), table.signed(new - old, text)]


def _row(name: str, old: Any, new: Any, text: Callable[[Any], str]) -> list[str]:
    return [name, text(old), *_cells(old, new, text)]


def _moves(
    numbers: Sequence[Mapping[str, Any]], text: Callable[[Any], str]
) -> tuple[list[list[str]], list[str]]:
    old, new = numbers
    table_rows = [_row(name, old.get(name, 0), new.get(name, 0), text) for name in {**old, **new}]
    return table_rows, _row("total", sum(old.values()), sum(new.values()), text)


def _times(report: Report) -> Mapping[str, float]:
    phase_seconds: defaultdict[str, float] = defaultdict(float)
    for span in report.spans:
        if span.lane == "compute":
            phase_seconds[span.what] += span.seconds
    return {**phase_seconds, "waits for collectives": report.exposed}


def _traffic(report: Report) -> Mapping[str, int]:
    sent_bytes: defaultdict[str, int] = defaultdict(int)
    for event in report.events:
        sent_bytes[f"{event.kind.replace('_', '-')} along {event.axis}"] += event.traffic
    return sent_bytes
