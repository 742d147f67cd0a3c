"""Two reports side by side: the changes between them, and how memory, time and traffic moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from funcshard._utils import Bullets, Part, Shown, Table, table
from funcshard.estimate.reports.differences import differences_between
from funcshard.estimate.reports.report import Report
from funcshard.estimate.reports.show import moment_text
from funcshard.estimate.reports.unit_use import UnitUse, by_unit, recomputed_units
from funcshard.plan import UnitPlan, unit_class


@dataclass(frozen=True, slots=True)
class UnitPair:
    """The use of a unit, or of equal units together, in two reports.

    Attributes:
        before: its use in the first report; ``None`` if the first plan has no such unit.
        after: its use in the second; ``None`` if the second plan has none.
    """

    before: UnitUse | None
    after: UnitUse | None

    def __post_init__(self) -> None:
        assert self.before or self.after, "a pair has a unit"

    @property
    def title(self) -> str:
        """Name of the unit, or of the equal units."""
        use = self.after or self.before
        assert use is not None, "checked above"
        return use.title

    def of(self, number: Callable[[UnitUse], Any]) -> tuple[Any, Any]:
        """Return a number of both uses, zero for a unit that is not there."""
        return number(self.before) if self.before else 0, number(self.after) if self.after else 0


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Shown):
    """Two reports side by side; made by ``compare``.

    Attributes:
        before: the first report.
        after: the second report.
        units: the use of each unit in both; equal units are one.
        changes: the differences between the plans, the options and the profiles, as clauses.
    """

    before: Report
    after: Report
    units: tuple[UnitPair, ...]
    changes: tuple[str, ...]

    def _parts(self) -> list[Part]:
        both = self.before, self.after
        where, earlier = (moment_text(report.peak_moment) for report in reversed(both))
        place = where if where == earlier else f"{where} instead of the {earlier}"
        return [
            Bullets("Changes", self.changes or ("none",)),
            self._table(),
            _moves(
                f"Memory at the peak, in the {place}",
                [each.by_category for each in both],
                table.size,
            ),
            _moves(
                "Time of a step",
                [*map(_times, both)],
                table.duration,
                [each.step_time for each in both],
            ),
            _moves("Traffic of a rank in a step", [*map(_traffic, both)], table.size),
        ]

    def _table(self) -> Table:
        header, columns = ["unit"], []
        for name, column_index, column_title in _COLUMNS:
            header += [name, "±"]
            columns.append(([pair.of(column_index) for pair in self.units], column_title))
        rows = [
            [
                pair.title,
                *(
                    cell
                    for column, cell_format in columns
                    for cell in _cells(*column[i], cell_format)
                ),
            ]
            for i, pair in enumerate(self.units)
        ]
        sums = [
            (sum(old for old, _ in column), sum(new for _, new in column), cell_format)
            for column, cell_format in columns
        ]
        total = [
            "total",
            *(cell for old, new, cell_format in sums for cell in _cells(old, new, cell_format)),
        ]
        titles = (
            f"{self.after.plan.fingerprint()} compared with plan {self.before.plan.fingerprint()}"
        )
        return Table(
            f"Plan {titles}; a row n × has the sum over n equal units", header, rows, total
        )


_COLUMNS: tuple[tuple[str, Callable[[UnitUse], Any], Callable[[Any], str]], ...] = (
    ("at the peak", lambda use: use.bytes, table.size),
    ("traffic", lambda use: use.traffic, table.size),
    ("compute", lambda use: use.compute, table.duration),
    ("collectives", lambda use: use.communication, table.duration),
)


def compare(before: Report, after: Report) -> Comparison:
    """Compare two reports: the changes between them, and how memory, time and traffic moved.

    If several things changed, only a further report with one of them alone tells how much it moves.

    Arguments:
        before: the first report.
        after: the second report.

    Returns:
        The comparison. ``print`` and notebooks show it.

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
    both = before.plan.units.keys() & after.plan.units.keys()
    recomputed_names = recomputed_units(before), recomputed_units(after)
    units = before.plan.units, after.plan.units
    known_classes: dict[str, Hashable] = {
        name: tuple(
            (unit_class(plan[name]), name in names)
            for plan, names in zip(units, recomputed_names, strict=True)
        )
        for name in both
    }

    def key(unit: UnitPlan) -> Hashable:
        return known_classes.get(unit.name)

    old, new = ({use.names: use for use in by_unit(report, key)} for report in (before, after))
    return tuple(UnitPair(old.get(names), new.get(names)) for names in dict.fromkeys((*new, *old)))


def _cells(old: Any, new: Any, text: Callable[[Any], str]) -> list[str]:
    return [text(new), table.signed(new - old, text)]


def _moves(
    title: str,
    values: Sequence[Mapping[str, Any]],
    text: Callable[[Any], str],
    total: Sequence[Any] = (),
) -> Table:
    """Return the table of numbers before and after; its last row is ``total``, or the sums."""

    def row(name: str, old: Any, new: Any) -> list[str]:
        return [name, text(old), text(new), table.signed(new - old, text)]

    rows = [
        row(name, *(report_values.get(name, 0) for report_values in values))
        for name in dict.fromkeys((*values[0], *values[1]))
    ]
    last = row("total", *(total or [sum(report_values.values()) for report_values in values]))
    return Table(title, ["", "before", "after", "±"], rows, last)


def _times(report: Report) -> Mapping[str, float]:
    """Return the seconds of each phase, and of the waits for collectives."""
    times: defaultdict[str, float] = defaultdict(float)
    for span in report.spans:
        if span.lane == "compute":
            times[span.what] += span.seconds
    return {**times, "waits for collectives": report.exposed}


def _traffic(report: Report) -> Mapping[str, int]:
    """Return the bytes that a rank sends, by kind of collective and mesh axis."""
    sent: defaultdict[str, int] = defaultdict(int)
    for event in report.events:
        sent[f"{event.kind.replace('_', '-')} along {event.axis}"] += event.traffic
    return sent
