"""``Report``: a step with tables and files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from funcshard._utils import table
from funcshard._utils.table import Part, Shown, Table
from funcshard.estimate.machine import source_of_sum, weakest
from funcshard.estimate.reports.perfetto import to_perfetto, tracks_of
from funcshard.estimate.reports.unit_use import COLUMNS, by_unit
from funcshard.estimate.walk import Moment, Step
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


@dataclass(frozen=True, slots=True, repr=False)
class Report(Shown, Step):
    """The memory, the time and the traffic of one training step; made by ``estimate``.

    You can print it as tables. ``Step`` lists its fields.
    """

    @property
    def binds(self) -> str:
        """Which resource limits the step, as a sentence: memory, communication or compute."""
        return binds_text(self)

    def to_perfetto(self, path: str | Path) -> Path:
        """Write a trace for https://ui.perfetto.dev to ``path`` (``.json``), and return it."""
        return to_perfetto(self, path)

    def _parts(self) -> Iterator[Part]:
        return report_parts(self)


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
    # Note: in use it fits, but the allocator may not.
    if report.budget and report.fits and report.reserved[1] >= _FULL * report.budget:
        reserved_share = table.share(report.reserved[1], report.budget)
        yield (
            f"Slow allocations: the allocator may reserve {reserved_share} of the budget. A full one frees "
            "what it does not use and waits for the device, which the step time leaves out."
        )


def source_of(report: Step, name: str) -> str:
    """Return the source of a number of a report, one of ``SOURCES``.

    Arguments:
        name: a field of the report, such as ``"peak"``, or a category of memory.
    """
    if name in report.sources:
        return report.sources[name]
    if name in _OF_TIME:
        # Note: the report doesn't name it, so it's the source of the sum of all spans.
        timed_sources = [(span.seconds, span.source) for span in report.spans]
        return source_of_sum(timed_sources) if timed_sources else "traced"
    # Note: the peak is a sum, which is as good as its weakest part.
    if name == "peak":
        return weakest(*(source_of(report, category) for category in report.by_category))
    if name in _EXACT:
        return "exact"
    return "calibrated" if name in ("communicators", "reserved") else "traced"


def moment_text(moment: Moment) -> str:
    """Return a moment as text, such as ``backward of blocks.3``."""
    words = _MOMENTS.get(moment.what, moment.what)
    if moment.what in _OF_STEP:
        return words
    return f"{words} of {moment.unit or '(root)'}"


def rate_text(report: Step) -> str:
    """Return a rank's tokens per second as text."""
    rate = report.tokens_per_second
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def left_text(budget: int | None, peak: int) -> str:
    """Return how far a peak is below or above a budget, such as ``1.5 GiB left``."""
    if budget is None:
        return ""
    return f"{table.size(abs(budget - peak))} {'left' if peak <= budget else 'too little'}"


def memory_table(report: Step, title: str) -> Table:
    """Return the memory at the peak as a table, by category."""
    # Note: a report made by hand may have categories that the simulator does not know.
    category_sizes = report.by_category | {
        category: size for category, size in report.peak_moment.memory.items() if size
    }
    table_rows = [
        [category, table.size(size), table.share(size, report.peak), source_of(report, category)]
        for category, size in category_sizes.items()
    ]
    total_row = ["total", table.size(report.peak), table.share(report.peak, report.peak), ""]
    return Table(title, ["category", "bytes", "share", "source"], table_rows, total_row)


def binds_text(report: Step) -> str:
    """Return which resource limits the step, as a sentence.

    Memory does if the peak is over the budget; communication if the rank waits for more than a
    quarter of the step; otherwise compute.
    """
    if not report.fits and report.budget is not None:
        bytes_over = report.peak - report.budget
        largest, size = max(report.by_category.items(), key=lambda item: item[1])
        return (
            f"Memory binds: the peak, {table.size(report.peak)} in the "
            f"{moment_text(report.peak_moment)}, is {table.size(bytes_over)} over the budget; {largest} "
            f"take {table.share(size, report.peak)} of it."
        )
    wait_text = f"the rank waits for collectives in {_of_step(report.exposed, report)}"
    # Note: a few waits are usual, because the first gather of a step has nothing to hide behind.
    is_communication = report.exposed > _SHARE_THAT_BINDS * report.step_time
    return f"{'Communication' if is_communication else 'Compute'} binds: {wait_text}."


def _summary(report: Step) -> Table:
    table_rows = []

    def row(quantity: str, value: str, note: str = "", source: str | None = None) -> None:
        number_name = quantity.lower().replace(" ", "_")
        table_rows.append([quantity, value, note, source or source_of(report, number_name)])

    row("peak", table.size(report.peak), moment_text(report.peak_moment))
    if report.reserved != (0, 0):
        low, high = map(table.size, report.reserved)
        row("reserved", f"{low} – {high}", "held by a caching allocator")
    if report.budget is not None:
        source, note = report.sources.get("budget", "given"), left_text(report.budget, report.peak)
        if source != "given":
            note = f"the device's memory, {note}"
        row("budget", table.size(report.budget), note, source)
    row("step time", table.duration(report.step_time))
    row("exposed", table.duration(report.exposed), _of_step(report.exposed, report))
    for track, spans in tracks_of(report).items():
        busy_seconds = sum(span.seconds for span in spans)
        if busy_seconds:
            source = source_of(report, "step_time")
            row(
                f"{track} lane",
                table.duration(busy_seconds),
                _of_step(busy_seconds, report),
                source,
            )
    if report.tokens:
        tokens = f"{table.count(report.tokens)} a rank and step"
        row("tokens per second", rate_text(report), tokens)
    if report.mfu:
        row("MFU", f"{100 * report.mfu:.1f} %", "model FLOPs of the hardware's peak")
    for axis, size in report.traffic.items():
        source = source_of(report, "traffic")
        row(f"traffic along {axis}", table.size(size), "sent by a rank in a step", source)
    plan = report.plan
    title = f"Report of plan {plan.fingerprint()} for {mesh_text(plan.mesh_axes)}, {report.hardware}; rank {report.rank}"
    return Table(
        f"{title}. {binds_text(report)}", ["quantity", "value", "note", "source"], table_rows
    )


def _of_step(seconds: float, report: Step) -> str:
    return f"{table.share(seconds, report.step_time)} of the step"


def _memory(report: Step) -> Table:
    return memory_table(report, f"Memory at the peak, in the {moment_text(report.peak_moment)}")


def _units(report: Step) -> Table:
    unit_uses = by_unit(report)
    header, table_rows, total_row = ["unit"], [[use.title] for use in unit_uses], ["total"]
    for title, number, text in COLUMNS:
        header.append(title)
        numbers = [number(use) for use in unit_uses]
        total_row.append(text(sum(numbers)))
        for row, value in zip(table_rows, numbers, strict=True):
            row.append(text(value))
    return Table(
        "By unit, memory that belongs to units; a row n × has the sum over n equal units",
        header,
        table_rows,
        total_row,
    )
