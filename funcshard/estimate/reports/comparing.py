"""``compare``: two reports side by side. ``tabulate``: many reports as one table."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from funcshard._utils import table
from funcshard._utils.table import Bullets, Part, Shown, Table
from funcshard.estimate.reports.report import (
    Report,
    by_unit,
    left_text,
    moment_text,
    moved_cells,
    rate_text,
    recomputed_units,
    unit_table,
)
from funcshard.plan import MixedPrecision, UnitPlan, fold_units, mesh_text, unit_class


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Shown):
    """Two reports side by side; made by ``compare``.

    Attributes:
        before: the first report.
        after: the second report.
        changes: the differences of plans, options and profiles, as clauses.
    """

    before: Report
    after: Report
    changes: tuple[str, ...]

    def _parts(self) -> list[Part]:
        both = self.before, self.after
        place_before, place_after = (moment_text(report.peak_moment) for report in both)
        if place_after != place_before:
            place_after = f"{place_after} instead of the {place_before}"
        memory_rows = _moves([report.by_category for report in both], table.size)
        time_rows = _moves([_times(report) for report in both], table.duration)
        # Note: phases overlap with waits, so the times of a step are not the sum of the rows.
        time_total = _row(
            "total", self.before.step_time, self.after.step_time, table.duration
        )
        traffic_rows = _moves([_traffic(report) for report in both], table.size)
        header = ["", "before", "after", "±"]
        return [
            Bullets("Changes", self.changes or ("none",)),
            self._units(),
            Table(f"Memory at the peak, in the {place_after}", header, *memory_rows),
            Table("Time of a step", header, time_rows[0], time_total),
            Table("Traffic of a rank in a step", header, *traffic_rows),
        ]

    def _units(self) -> Table:
        both = self.before, self.after
        recomputed_names = [recomputed_units(report) for report in both]

        def key(unit: UnitPlan) -> Hashable:
            # Note: units are folded only if they are equal in both reports, so that rows match.
            return tuple(
                (unit.name in names, unit.name in report.plan.units and unit_class(report.plan.units[unit.name]))
                for report, names in zip(both, recomputed_names, strict=True)
            )  # fmt: skip

        plan_names = [report.plan.fingerprint() for report in (self.after, self.before)]
        title = f"Plan {plan_names[0]} compared with plan {plan_names[1]}"
        return unit_table(title, by_unit(self.after, key), by_unit(self.before, key))


def compare(before: Report, after: Report) -> Comparison:
    """Compare two reports: what changed, and how memory, time and traffic moved.

    Arguments:
        before: the first report.
        after: the second report.

    Returns:
        The comparison, which you can print.

    Raises:
        TypeError: an argument isn't a report.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> apply, params, buffers = fs.make_functional(net)
        >>> profile = fs.profile(apply, params, buffers, torch.zeros(8, 64))
        >>> both = ["full_shard", "no_shard"]
        >>> plans = [fs.make_plan(params, 8, units=["0", "1"], strategy=each) for each in both]
        >>> found = fs.compare(*(fs.estimate(profile, plan) for plan in plans))
        >>> found.changes
        ('all units: strategy is no_shard instead of full_shard',)
    """
    for name, report in (("before", before), ("after", after)):
        if not isinstance(report, Report):
            raise TypeError(
                f"{name} must be a Report that estimate returned; found {type(report).__name__}"
            )
    return Comparison(before, after, tuple(_changes(before, after)))


# --- what changed ---------------------------------------------------------------------------------

_OF_UNITS = ("strategy", "reshard_after_forward", "reshard_after_backward", "offload")


def _changes(before: Report, after: Report) -> Iterator[str]:
    old_facts, new_facts = _facts(before), _facts(after)
    clauses = list(_differences(old_facts, new_facts))
    # Note: units that differ in the same way are one clause.
    units_by_change: dict[str, set[str]] = defaultdict(set)
    old_remat, new_remat = recomputed_units(before), recomputed_units(after)
    common_units = [unit for unit in after.plan.unit_list if unit.name in before.plan.units]
    for unit in common_units:
        old_unit = before.plan.units[unit.name]
        facts = _unit_facts(old_unit, old_remat), _unit_facts(unit, new_remat)
        for change in _differences(*facts):
            # Why: with another strategy a unit is also freed at other times.
            if old_unit.strategy == unit.strategy or not change.startswith("reshard"):
                units_by_change[change].add(unit.name)
    for change, names in units_by_change.items():
        groups = fold_units(common_units, key=lambda unit: unit.name in names)
        titles = [group.title for group in groups if group.first.name in names]
        is_all = len(names) == len(common_units) > 1
        clauses.append(f"{'all units' if is_all else ' and '.join(titles)}: {change}")
    yield from clauses
    if not clauses and before != after:
        yield "the reports differ in what this list does not show"


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            yield f"{name} is {new.get(name)} instead of {old.get(name)}"


def _facts(report: Report) -> dict[str, Any]:
    plan, schedule = report.plan, report.schedule
    batch_count = report.accumulation.micro_batches
    forward_spans = [span for span in report.spans if span.what in ("forward", "loss")]
    return {
        "the hardware": report.hardware,
        "the mesh": mesh_text(plan.mesh_axes),
        "the number of parameters": f"{sum(math.prod(leaf.whole_shape) for leaf in plan.leaves):,}",
        "the number of units": len(plan.units),
        "forward_prefetch": schedule.forward_prefetch,
        "backward_prefetch": schedule.backward_prefetch,
        "limit": schedule.limit,
        **{
            name: value
            for name, value in report.options.items()
            if name not in ("remat", "accumulate")
        },
        **dataclasses.asdict(report.accumulation),
        "the number of tokens in a micro-batch": f"{report.tokens // batch_count:,}",
        "FLOPs of forward and loss": f"{sum(span.flops for span in forward_spans) // batch_count:,}",
    }


def _unit_facts(unit: UnitPlan, recomputed: Collection[str]) -> dict[str, Any]:
    return {
        **{name: getattr(unit, name) for name in _OF_UNITS},
        **dataclasses.asdict(unit.precision or MixedPrecision()),
        "the dtype of leaves": " and ".join(dict.fromkeys(b.dtype for b in unit.buffers)),
        "trainable": any(buffer.trainable for buffer in unit.buffers),
        "remat": unit.name in recomputed,
    }


# --- rows of tables -------------------------------------------------------------------------------


def _row(name: str, old: Any, new: Any, text: Callable[[Any], str]) -> list[str]:
    return [name, text(old), *moved_cells(text, new, old)]


def _moves(
    numbers: Sequence[Mapping[str, Any]], text: Callable[[Any], str]
) -> tuple[list[list[str]], list[str]]:
    old, new = numbers
    table_rows = [
        _row(name, old.get(name, 0), new.get(name, 0), text) for name in {**old, **new}
    ]
    return table_rows, _row("total", sum(old.values()), sum(new.values()), text)


def _times(report: Report) -> Mapping[str, float]:
    phase_seconds = defaultdict[str, float](float)
    for span in report.spans:
        if span.lane == "compute":
            phase_seconds[span.what] += span.seconds
    return {**phase_seconds, "waits for collectives": report.exposed}


def _traffic(report: Report) -> Mapping[str, int]:
    sent_bytes = Counter[str]()
    for event in report.events:
        sent_bytes[f"{event.kind.replace('_', '-')} along {event.axis}"] += event.traffic
    return sent_bytes


# --- many reports ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class ReportTable(Shown):
    """Reports by name as one table, made by ``tabulate``."""

    reports: Mapping[str, Report]

    def _parts(self) -> list[Table]:
        header = [
            "", "mesh", "peak", "budget", "peak in the", "step time", "waits", "tokens per second", "MFU", "sent",
        ]  # fmt: skip
        table_rows = []
        for name, report in self.reports.items():
            table_rows.append([
                name,
                mesh_text(report.plan.mesh_axes),
                table.size(report.peak),
                left_text(report.budget, report.peak),
                moment_text(report.peak_moment),
                table.duration(report.step_time),
                table.share(report.exposed, report.step_time),
                rate_text(report) if report.tokens else "",
                f"{100 * report.mfu:.1f} %" if report.mfu else "",
                table.size(sum(report.traffic.values())),
            ])  # fmt: skip
        hardware_names = dict.fromkeys(report.hardware for report in self.reports.values())
        return [
            Table(
                f"{len(table_rows)} reports of one rank and step, {', '.join(hardware_names)}",
                header,
                table_rows,
            )
        ]


def tabulate(reports: Mapping[str, Report]) -> ReportTable:
    """Return a table of many reports, a row each, which you can print.

    Arguments:
        reports: the reports by name.

    Example:
        >>> import torch, funcshard as fs
        >>> from funcshard.estimate import tabulate
        >>> apply, params, buffers = fs.make_functional(torch.nn.Linear(64, 64))
        >>> profile = fs.profile(apply, params, buffers, torch.zeros(8, 64))
        >>> reports = {f"{n} ranks": fs.estimate(profile, fs.make_plan(params, n)) for n in (1, 8)}
        >>> [line.split()[:2] for line in str(tabulate(reports)).splitlines()[4:6]]
        [['1', 'ranks'], ['8', 'ranks']]
    """
    return ReportTable(reports)
