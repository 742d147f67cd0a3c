"""``tabulate``, and its table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from funcshard._utils import table
from funcshard._utils.table import Shown, Table
from funcshard.estimate.reports.report import Report, left_text, moment_text, rate_text
from funcshard.plan import mesh_text


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

    Raises:
        TypeError: ``reports`` is no mapping of reports.
        ValueError: there is no report.

    Example:
        >>> import torch, funcshard as fs
        >>> from funcshard.estimate import tabulate
        >>> apply, params, buffers = fs.make_functional(torch.nn.Linear(64, 64))
        >>> profile = fs.profile(apply, params, buffers, torch.zeros(8, 64))
        >>> reports = {f"{n} ranks": fs.estimate(profile, fs.make_plan(params, n)) for n in (1, 8)}
        >>> [line.split()[:2] for line in str(tabulate(reports)).splitlines()[4:6]]
        [['1', 'ranks'], ['8', 'ranks']]
    """
    if not isinstance(reports, Mapping):
        raise TypeError(
            f"reports must be a dictionary of names and reports; found {type(reports).__name__}"
        )
    if not reports:
        raise ValueError(
            "reports must hold at least one report; found none: pass a dictionary of names and "
            "reports"
        )
    for name, report in reports.items():
        if not isinstance(report, Report):
            raise TypeError(
                f"reports must hold what estimate returned; found {type(report).__name__} at "
                f"{name!r}"
            )
    return ReportTable(reports)
