"""A report as text and as HTML: the numbers of the step with their sources, memory, and units."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import NamedTuple

from funcshard._utils import table
from funcshard.estimate.machine import SOURCES
from funcshard.estimate.reports.unit_use import by_unit
from funcshard.estimate.walk import CATEGORIES, LANES, Moment, Step
from funcshard.plan import mesh_text

__all__ = ["binds_text", "moment_text", "report_html", "report_text", "source_of"]

# The sources of numbers that a report does not name itself. Sizes of leaves, collectives and
# states follow from the plan; all other sizes come from the trace.
_EXACT = ("shards", "optimizer", "gathered", "gradients", "reduction", "gradient shards", "traffic", "budget")
_OF_TIME = ("step_time", "exposed", "tokens_per_second", "mfu")

# Moments of the whole step; every other moment is one of a unit.
_OF_STEP = ("start", "loss", "optimizer", "end")
_MOMENTS = {
    "start": "start of the step", "end": "end of the step", "reduce": "reduction", "reduced": "end of the reduction",
    "join": "joining of the gradients", "accumulate": "addition to the gradients",
}  # fmt: skip

_SHARE_THAT_BINDS = 0.25  # of the step, in which the rank waits for collectives
_FULL = 0.95  # of the budget; the rest is for the CUDA context and NCCL, which are not in the band


class _Table(NamedTuple):
    title: str
    header: list[str]
    rows: list[list[str]]
    total: list[str] | None = None


def report_text(report: Step) -> str:
    """Return a report as text tables; ``print(report)`` shows them."""
    tables = [table.as_text(each.title, each.header, each.rows, total=each.total) for each in _tables(report)]
    return "\n\n".join([*tables, *_remarks(report)])


def _remarks(report: Step) -> list[str]:
    remarks = []
    if any(report.reserved):
        remarks.append(f"Reserved memory: {report.reserved_source}." if report.reserved_source else "")
    if report.budget and report.fits and report.reserved[1] >= _FULL * report.budget:
        share = table.share(report.reserved[1], report.budget)
        remarks.append(
            f"Slow allocations: the allocator may reserve {share} of the budget. A full one frees what it does not use and "
            f"waits for the device, which the step time leaves out."
        )
    return remarks


def report_html(report: Step) -> str:
    """Return a report as HTML tables, for a notebook."""
    tables = (table.as_html(each.title, each.header, each.rows, total=each.total) for each in _tables(report))
    return "".join(
        f'<div style="display:inline-block;vertical-align:top;margin:0 24px 12px 0">{each}</div>' for each in tables
    ) + "".join(f"<p>{html.escape(each)}</p>" for each in _remarks(report))


def source_of(report: Step, name: str) -> str:
    """Return the source of a number of a report, one of ``SOURCES``.

    Arguments:
        report: the report.
        name: name of a field of the report, such as ``"peak"``, or a category of memory. If
            ``report.sources`` does not have it, a time has the weakest source of all spans.
    """
    if name in report.sources:
        return report.sources[name]
    if name in _OF_TIME:
        return max((span.source for span in report.spans), key=SOURCES.index, default="traced")
    if name == "peak":
        return max((source_of(report, category) for category in report.by_category), key=SOURCES.index)
    return "exact" if name in _EXACT else "calibrated" if name == "communicators" else "traced"


def moment_text(moment: Moment) -> str:
    """Return a moment as text, such as ``backward of blocks.3``."""
    words = _MOMENTS.get(moment.what, moment.what)
    return words if moment.what in _OF_STEP else f"{words} of {moment.unit or '(root)'}"


def binds_text(report: Step) -> str:
    """Return in a sentence which resource limits the step: memory, communication or compute.

    Memory binds if the peak is over the budget; communication if the rank waits for collectives in
    more than a quarter of the step; compute otherwise.
    """
    if not report.fits and report.budget is not None:
        over, (largest, size) = report.peak - report.budget, _largest(report)
        return (
            f"Memory binds: the peak, {table.size(report.peak)} in the {moment_text(report.peak_moment)}, is "
            f"{table.size(over)} over the budget; {largest} take {table.share(size, report.peak)} of it."
        )
    waits = f"the rank waits for collectives in {table.share(report.exposed, report.step_time)} of the step"
    resource = "Communication" if report.exposed > _SHARE_THAT_BINDS * report.step_time else "Compute"
    return f"{resource} binds: {waits}."


def _largest(report: Step) -> tuple[str, int]:
    return max(report.by_category.items(), key=lambda item: item[1])


def _tables(report: Step) -> Iterable[_Table]:
    yield _summary(report)
    yield _memory(report)
    yield _units(report)


def _summary(report: Step) -> _Table:
    plan, rows = report.plan, []

    def row(quantity: str, value: str, note: str, source: str) -> None:
        rows.append([quantity, value, note, source])

    row("peak", table.size(report.peak), moment_text(report.peak_moment), source_of(report, "peak"))
    if report.reserved != (0, 0):
        low, high = map(table.size, report.reserved)
        row("reserved", f"{low} – {high}", "held by a caching allocator", "calibrated")
    if report.budget is not None:
        left = report.budget - report.peak
        row("budget", table.size(report.budget), f"{table.size(abs(left))} {'left' if left >= 0 else 'too little'}", "given")
    row("step time", table.duration(report.step_time), "", source_of(report, "step_time"))
    row("exposed", table.duration(report.exposed), _of_step(report.exposed, report), source_of(report, "exposed"))
    for lane in LANES:
        busy = sum(span.seconds for span in report.spans if span.lane == lane)
        if busy:
            row(f"{lane} lane", table.duration(busy), _of_step(busy, report), source_of(report, "step_time"))
    if report.tokens:
        rate = f"{report.tokens_per_second:,.0f}"
        row(
            "tokens per second",
            rate,
            f"{table.count(report.tokens)} a rank and step",
            source_of(report, "tokens_per_second"),
        )
    if report.mfu:
        row("MFU", f"{100 * report.mfu:.1f} %", "model FLOPs of the hardware's peak", source_of(report, "mfu"))
    for axis, size in report.traffic.items():
        row(f"traffic along {axis}", table.size(size), "sent by a rank in a step", source_of(report, "traffic"))
    title = f"Report of plan {plan.fingerprint()} for {mesh_text(plan.mesh_axes)}, {report.hardware}; rank {report.rank}"
    return _Table(f"{title}. {binds_text(report)}", ["quantity", "value", "note", "source"], rows)


def _of_step(seconds: float, report: Step) -> str:
    return f"{table.share(seconds, report.step_time)} of the step"


def _memory(report: Step) -> _Table:
    peak, found = report.peak_moment, report.by_category
    others = {category: size for category, size in peak.memory.items() if category not in CATEGORIES and size}
    rows = [
        [category, table.size(size), table.share(size, report.peak), source_of(report, category)]
        for category, size in (found | others).items()
    ]
    total = ["total", table.size(report.peak), table.share(report.peak, report.peak), ""]
    return _Table(f"Memory at the peak, in the {moment_text(peak)}", ["category", "bytes", "share", "source"], rows, total)


def _units(report: Step) -> _Table:
    uses = by_unit(report)

    def cells(title: str, size: int, traffic: int, compute: float, communication: float) -> list[str]:
        return [title, table.size(size), table.size(traffic), table.duration(compute), table.duration(communication)]

    rows = [cells(use.title, use.bytes, use.traffic, use.compute, use.communication) for use in uses]
    total = cells(
        "total",
        sum(use.bytes for use in uses),
        sum(use.traffic for use in uses),
        sum(use.compute for use in uses),
        sum(use.communication for use in uses),
    )
    header = ["unit", "at the peak", "traffic", "compute", "collectives"]
    return _Table("By unit, memory that belongs to units; a row n × has the sum over n equal units", header, rows, total)
