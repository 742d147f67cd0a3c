"""A report as text and as HTML: the numbers of the step with their sources, memory, and units."""

from __future__ import annotations

from collections.abc import Iterator

from funcshard._utils import Part, Table, table
from funcshard.estimate.machine import SOURCES, source_of_sum
from funcshard.estimate.reports.tracks import tracks_of
from funcshard.estimate.reports.unit_use import by_unit
from funcshard.estimate.walk import CATEGORIES, Moment, Step
from funcshard.plan import mesh_text

# The sources of numbers that a report does not name itself. Sizes of leaves, collectives and
# states follow from the plan; all other sizes come from the trace.
_EXACT = (
    "shards",
    "optimizer",
    "gathered",
    "gradients",
    "reduction",
    "gradient shards",
    "traffic",
    "budget",
)
_OF_TIME = ("step_time", "exposed", "tokens_per_second", "mfu")

# Moments of the whole step; every other moment is one of a unit.
_OF_STEP = ("start", "loss", "optimizer", "end")
_MOMENTS = {
    "start": "start of the step", "end": "end of the step", "reduce": "reduction", "reduced": "end of the reduction",
    "join": "joining of the gradients", "accumulate": "addition to the gradients",
}  # fmt: skip

_SHARE_THAT_BINDS = 0.25  # of the step, in which the rank waits for collectives
_FULL = 0.95  # of the budget; the rest is for the CUDA context and NCCL, which are not in the band


def report_parts(report: Step) -> Iterator[Part]:
    """Yield the tables and remarks of a report."""
    yield _summary(report)
    yield _memory(report)
    yield _units(report)
    if any(report.reserved) and report.reserved_source:
        yield f"Reserved memory: {report.reserved_source}."
    if (
        any(unit.offload for unit in report.plan.unit_list)
        and report.options.get("optimizer") is not None
    ):
        yield "Offload: the optimizer's update of offloaded shards runs on the host, and the step time leaves it out."
    asked_budget = report.options.get("budget")
    if isinstance(asked_budget, int) and report.budget is not None and asked_budget > report.budget:
        yield f"Budget: {table.size(asked_budget)} is more than the device has, so its memory counts."
    if report.budget and report.fits and report.reserved[1] >= _FULL * report.budget:
        share = table.share(report.reserved[1], report.budget)
        yield (
            f"Slow allocations: the allocator may reserve {share} of the budget. A full one frees "
            "what it does not use and waits for the device, which the step time leaves out."
        )


def source_of(report: Step, name: str) -> str:
    """Return the source of a number of a report, one of ``SOURCES``.

    Arguments:
        report: the report.
        name: name of a field of the report, such as ``"peak"``, or a category of memory. If
            ``report.sources`` does not have it, a time has the source of the sum of all spans.
    """
    if name in report.sources:
        return report.sources[name]
    if name in _OF_TIME:
        return (
            source_of_sum((span.seconds, span.source) for span in report.spans)
            if report.spans
            else "traced"
        )
    if name == "peak":
        return max(
            (source_of(report, category) for category in report.by_category), key=SOURCES.index
        )
    if name in _EXACT:
        return "exact"
    return "calibrated" if name in ("communicators", "reserved") else "traced"


def moment_text(moment: Moment) -> str:
    """Return a moment as text, such as ``backward of blocks.3``."""
    words = _MOMENTS.get(moment.what, moment.what)
    return words if moment.what in _OF_STEP else f"{words} of {moment.unit or '(root)'}"


def rate_text(report: Step) -> str:
    """Return the tokens of a rank in a second, a small number with three digits."""
    rate = report.tokens_per_second
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def left_text(budget: int | None, peak: int) -> str:
    """Return how far a peak is below a budget, or above it, such as ``1.5 GiB left``."""
    if budget is None:
        return ""
    return f"{table.size(abs(budget - peak))} {'left' if peak <= budget else 'too little'}"


def memory_table(report: Step, title: str) -> Table:
    """Return the table of the memory at the peak, by category."""
    peak, category_bytes = report.peak_moment, report.by_category
    others = {
        category: size
        for category, size in peak.memory.items()
        if category not in CATEGORIES and size
    }
    rows = [
        [category, table.size(size), table.share(size, report.peak), source_of(report, category)]
        for category, size in (category_bytes | others).items()
    ]
    total = ["total", table.size(report.peak), table.share(report.peak, report.peak), ""]
    return Table(title, ["category", "bytes", "share", "source"], rows, total)


def binds_text(report: Step) -> str:
    """Return in a sentence which resource limits the step: memory, communication or compute.

    Memory binds if the peak is over the budget; communication if the rank waits for collectives in
    more than a quarter of the step; compute otherwise.
    """
    if not report.fits and report.budget is not None:
        over, (largest, size) = report.peak - report.budget, _largest(report)
        return (
            f"Memory binds: the peak, {table.size(report.peak)} in the "
            f"{moment_text(report.peak_moment)}, is {table.size(over)} over the budget; {largest} "
            f"take {table.share(size, report.peak)} of it."
        )
    waits = f"the rank waits for collectives in {table.share(report.exposed, report.step_time)} of the step"
    resource = (
        "Communication" if report.exposed > _SHARE_THAT_BINDS * report.step_time else "Compute"
    )
    return f"{resource} binds: {waits}."


def _largest(report: Step) -> tuple[str, int]:
    return max(report.by_category.items(), key=lambda item: item[1])


def _summary(report: Step) -> Table:
    plan, rows = report.plan, []

    def row(quantity: str, value: str, note: str, source: str) -> None:
        rows.append([quantity, value, note, source])

    row("peak", table.size(report.peak), moment_text(report.peak_moment), source_of(report, "peak"))
    if report.reserved != (0, 0):
        low, high = map(table.size, report.reserved)
        row(
            "reserved",
            f"{low} – {high}",
            "held by a caching allocator",
            source_of(report, "reserved"),
        )
    if report.budget is not None:
        source, note = report.sources.get("budget", "given"), left_text(report.budget, report.peak)
        row(
            "budget",
            table.size(report.budget),
            note if source == "given" else f"the device's memory, {note}",
            source,
        )
    row("step time", table.duration(report.step_time), "", source_of(report, "step_time"))
    row(
        "exposed",
        table.duration(report.exposed),
        _of_step(report.exposed, report),
        source_of(report, "exposed"),
    )
    for track, spans in tracks_of(report).items():
        busy = sum(span.seconds for span in spans)
        if busy:
            row(
                f"{track} lane",
                table.duration(busy),
                _of_step(busy, report),
                source_of(report, "step_time"),
            )
    if report.tokens:
        tokens = f"{table.count(report.tokens)} a rank and step"
        row("tokens per second", rate_text(report), tokens, source_of(report, "tokens_per_second"))
    if report.mfu:
        row(
            "MFU",
            f"{100 * report.mfu:.1f} %",
            "model FLOPs of the hardware's peak",
            source_of(report, "mfu"),
        )
    for axis, size in report.traffic.items():
        row(
            f"traffic along {axis}",
            table.size(size),
            "sent by a rank in a step",
            source_of(report, "traffic"),
        )
    title = f"Report of plan {plan.fingerprint()} for {mesh_text(plan.mesh_axes)}, {report.hardware}; rank {report.rank}"
    return Table(f"{title}. {binds_text(report)}", ["quantity", "value", "note", "source"], rows)


def _of_step(seconds: float, report: Step) -> str:
    return f"{table.share(seconds, report.step_time)} of the step"


def _memory(report: Step) -> Table:
    return memory_table(report, f"Memory at the peak, in the {moment_text(report.peak_moment)}")


def _units(report: Step) -> Table:
    uses = by_unit(report)

    def cells(
        title: str, size: int, traffic: int, compute: float, communication: float
    ) -> list[str]:
        return [
            title,
            table.size(size),
            table.size(traffic),
            table.duration(compute),
            table.duration(communication),
        ]

    rows = [
        cells(use.title, use.bytes, use.traffic, use.compute, use.communication) for use in uses
    ]
    total = cells(
        "total",
        sum(use.bytes for use in uses),
        sum(use.traffic for use in uses),
        sum(use.compute for use in uses),
        sum(use.communication for use in uses),
    )
    header = ["unit", "at the peak", "traffic", "compute", "collectives"]
    return Table(
        "By unit, memory that belongs to units; a row n × has the sum over n equal units",
        header,
        rows,
        total,
    )
