"""Two reports side by side: the use of each unit, the changes, and their effects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from funcshard._utils import Bullets, Part, Shown, Table, table
from funcshard.estimate.reports.differences import (
    BACKWARD,
    COMPUTE,
    EXPOSED,
    MESH,
    TRAFFIC,
    Difference,
    differences_between,
)
from funcshard.estimate.reports.report import Report
from funcshard.estimate.reports.show import moment_text
from funcshard.estimate.reports.unit_use import UnitUse, by_unit, recomputed_units
from funcshard.estimate.walk import CATEGORIES
from funcshard.plan import UnitPlan, unit_class

__all__ = ["Comparison", "UnitPair", "compare"]

_SMALL = 0.02  # of the largest move: smaller moves have no sentence
_MOST_CAUSES = 3
_NAMES = {
    "optimizer": "optimizer state", "gathered": "gathered parameters", "activations": "saved activations",
    "loss": "the loss's temporaries", "reduction": "reduction buffers",
}  # fmt: skip
_PHASES = {"optimizer": "the optimizer", "loss": "the loss"}


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
        changes: the differences between the plans and options, as clauses.
        reasons: sentences that say how the peak, the time and the traffic moved, and why.
    """

    before: Report
    after: Report
    units: tuple[UnitPair, ...]
    changes: tuple[str, ...]
    reasons: tuple[str, ...]

    def _parts(self) -> list[Part]:
        lists = {"Changes": self.changes, "Effects": self.reasons}
        return [self._table(), *(Bullets(heading, lines or ("none",)) for heading, lines in lists.items())]

    def _table(self) -> Table:
        header, columns = ["unit"], []
        for name, number, text in _COLUMNS:
            header += [name, "±"]
            columns.append(([pair.of(number) for pair in self.units], text))
        rows = [
            [pair.title, *(cell for column, text in columns for cell in _cells(*column[i], text))]
            for i, pair in enumerate(self.units)
        ]
        sums = [(sum(old for old, _ in column), sum(new for _, new in column), text) for column, text in columns]
        total = ["total", *(cell for old, new, text in sums for cell in _cells(old, new, text))]
        titles = f"{self.after.plan.fingerprint()} compared with plan {self.before.plan.fingerprint()}"
        return Table(f"Plan {titles}; a row n × has the sum over n equal units", header, rows, total)


_COLUMNS: tuple[tuple[str, Callable[[UnitUse], Any], Callable[[Any], str]], ...] = (
    ("at the peak", lambda use: use.bytes, table.size),
    ("traffic", lambda use: use.traffic, table.size),
    ("compute", lambda use: use.compute, table.duration),
    ("collectives", lambda use: use.communication, table.duration),
)


def compare(before: Report, after: Report) -> Comparison:
    """Compare two reports: the use of each unit, the changes, and their effects.

    A sentence names a cause only among changes that can move its number. If several can, it lists
    them; only a further report with one of them alone tells how much each moves. At another
    moment of the step other bytes are there, so a peak that lies elsewhere has no sure cause.

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
            raise TypeError(f"{name} must be a Report that estimate returned; found {type(report).__name__}")
    changes = differences_between(before, after)
    reasons = (*_of_peak(before, after, changes), *_of_time(before, after, changes), *_of_traffic(before, after, changes))
    return Comparison(before, after, _pairs(before, after), tuple(change.text for change in changes), reasons)


# --- units ----------------------------------------------------------------------------------------


def _pairs(before: Report, after: Report) -> tuple[UnitPair, ...]:
    both = before.plan.units.keys() & after.plan.units.keys()
    again = recomputed_units(before), recomputed_units(after)
    units = before.plan.units, after.plan.units
    known: dict[str, Hashable] = {
        name: tuple((unit_class(plan[name]), name in names) for plan, names in zip(units, again, strict=True))
        for name in both
    }

    def key(unit: UnitPlan) -> Hashable:
        return known.get(unit.name)

    old, new = ({use.names: use for use in by_unit(report, key)} for report in (before, after))
    return tuple(UnitPair(old.get(names), new.get(names)) for names in dict.fromkeys((*new, *old)))


def _cells(old: Any, new: Any, text: Callable[[Any], str]) -> list[str]:
    return [text(new), table.signed(new - old, text)]


# --- sentences ------------------------------------------------------------------------------------


def _of_peak(before: Report, after: Report, changes: tuple[Difference, ...]) -> Iterable[str]:
    old, new = before.peak, after.peak
    where, earlier = moment_text(after.peak_moment), moment_text(before.peak_moment)
    same = where == earlier
    place = f"in the {where}" if same else f"in the {where} instead of the {earlier}"
    yield f"The peak {_moved(old, new, table.size)}; it lies {place}."
    moves = {name: (before.peak_moment.memory.get(name, 0), after.peak_moment.memory.get(name, 0)) for name in CATEGORIES}
    for name, pair in _large(moves):
        cause = _because(changes, name, sure=same)
        yield f"The bytes of {_NAMES.get(name, name)} at the peak {_moved(*pair, table.size, many=True)}{cause}."


def _of_time(before: Report, after: Report, changes: tuple[Difference, ...]) -> Iterable[str]:
    yield f"The step time {_moved(before.step_time, after.step_time, table.duration)}."
    parts: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for i, report in enumerate((before, after)):
        for span in report.spans:
            if span.lane == "compute":
                parts[span.what][i] += span.seconds
    moves = {name: (old, new) for name, (old, new) in parts.items()}
    moves[EXPOSED] = before.exposed, after.exposed
    for name, (old, new) in _large(moves):
        subject = "The wait for collectives" if name == EXPOSED else f"The time of {_PHASES.get(name, name)}"
        key = name if name in (EXPOSED, BACKWARD, "optimizer") else COMPUTE
        yield f"{subject} {_moved(old, new, table.duration)}{_because(changes, key)}."


def _of_traffic(before: Report, after: Report, changes: tuple[Difference, ...]) -> Iterable[str]:
    sent: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for i, report in enumerate((before, after)):
        for event in report.events:
            sent[event.axis, event.kind][i] += event.traffic
    for axis in dict.fromkeys(axis for axis, _ in sent):
        old, new = (report.traffic.get(axis, 0) for report in (before, after))
        if old == new:
            continue
        kinds = {kind: (pair[0], pair[1]) for (along, kind), pair in sent.items() if along == axis}
        parts = ", ".join(f"{kind.replace('_', '-')} {table.signed(b - a, table.size)}" for kind, (a, b) in _large(kinds))
        sizes = [report.plan.mesh_axes.get(axis, 1) for report in (before, after)]
        cause = _because(changes, TRAFFIC if min(sizes) > 1 else MESH)
        yield f"The traffic along {axis} {_moved(old, new, table.size)} ({parts}){cause}."


def _large(moves: dict[str, tuple[Any, Any]]) -> list[tuple[str, tuple[Any, Any]]]:
    """Return the moves that have a sentence, the largest first."""
    most = max((abs(new - old) for old, new in moves.values()), default=0)
    found = [(name, pair) for name, pair in moves.items() if abs(pair[1] - pair[0]) > _SMALL * most]
    return sorted(found, key=lambda item: -abs(item[1][1] - item[1][0]))


def _moved(old: Any, new: Any, text: Callable[[Any], str], *, many: bool = False) -> str:
    """Return how a number moved, as the end of a sentence; ``many``: its subject is plural."""
    ending = "" if many else "s"
    if text(old) == text(new):
        return f"stay{ending} at {text(new)}"
    share = f" ({table.share(abs(new - old), old)})" if old and new else ""
    return f"{'fall' if new < old else 'rise'}{ending} by {text(abs(new - old))}{share}, from {text(old)} to {text(new)}"


def _because(changes: tuple[Difference, ...], key: str, *, sure: bool = True) -> str:
    """Return the changes that can move a number; as its cause if it is one and ``sure``."""
    causes = [change.text for change in changes if key in change.moves]
    if not causes:
        return ""
    if len(causes) == 1 and sure:
        return f", because {causes[0]}"
    more = f", and {len(causes) - _MOST_CAUSES} more" if len(causes) > _MOST_CAUSES else ""
    return f"; changes that can move it: {', '.join(causes[:_MOST_CAUSES])}{more}"
