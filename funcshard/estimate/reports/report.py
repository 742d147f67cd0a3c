"""``Report``: a step with tables and files.

Source of trace files: "Trace Event Format", Google, and
https://perfetto.dev/docs/getting-started/other-formats.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from funcshard._utils import table
from funcshard._utils.table import Part, Shown, Table
from funcshard.estimate.machine import source_of_sum
from funcshard.estimate.walk import CATEGORIES, LANES, Moment, Span
from funcshard.plan import (
    Accumulation,
    Event,
    Plan,
    Schedule,
    UnitPlan,
    fold_units,
    mesh_text,
)

# The sources of numbers that a report does not name itself. Sizes of leaves, collectives and
# states follow from the plan; all other sizes come from the trace.
_SOURCES = {
    **dict.fromkeys(
        ("shards", "optimizer", "gathered", "gradients", "reduction", "gradient shards", "traffic", "budget"), "exact"
    ),
    **dict.fromkeys(("communicators", "reserved"), "calibrated"),
}  # fmt: skip
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
class Report(Shown):
    """The memory, the time and the traffic of one training step; made by ``estimate``.

    You can print it as tables.

    Attributes:
        schedule: the schedule, in the order in which the trace ran the units.
        timeline: the memory of the rank, moment by moment.
        peak_moment: the first moment with the most memory.
        spans: its computations and collectives, and when they run.
        events: its collectives, in order; equal to ``record_events`` around the step.
        exposed: seconds in which the rank waits for a collective.
        tokens: tokens of a rank in a step; 0 if the inputs aren't tokens.
        flops: the model's FLOPs, as ``mfu`` counts them.
        reserved: the least and the most bytes of a caching allocator; zeros on a CPU.
        reserved_source: where the two factors come from.
        unit_memory: bytes at the peak by unit and category.
    """

    plan: Plan
    schedule: Schedule
    hardware: str
    timeline: tuple[Moment, ...]
    peak_moment: Moment
    spans: tuple[Span, ...]
    events: tuple[Event, ...]
    step_time: float
    exposed: float
    budget: int
    tokens: int = 0
    flops: int = 0
    peak_flops: float = 0.0
    reserved: tuple[int, int] = (0, 0)
    reserved_source: str = ""
    unit_memory: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Most bytes that the rank holds at any moment."""
        return self.peak_moment.total

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes by category at the peak."""
        memory = self.peak_moment.memory
        return {
            category: memory[category] for category in CATEGORIES if memory.get(category)
        }

    @property
    def remat(self) -> tuple[str, ...]:
        """Names of the units that backward recomputes."""
        return cast("tuple[str, ...]", self.options.get("remat", ()))

    @property
    def accumulation(self) -> Accumulation:
        """What the step runs before it updates."""
        return cast("Accumulation", self.options.get("accumulate", Accumulation()))

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes that the rank sends in one step, by mesh axis."""
        traffic_by_axis = Counter[str]()
        for event in self.events:
            traffic_by_axis[event.axis] += event.traffic
        return dict(traffic_by_axis)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of one rank in one second."""
        return self.tokens / self.step_time if self.step_time else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: FLOPs of the model in a second ÷ the hardware's peak."""
        return (
            self.flops / (self.step_time * self.peak_flops)
            if self.step_time and self.peak_flops
            else 0.0
        )

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.peak <= self.budget

    @property
    def tracks(self) -> dict[str, tuple[Span, ...]]:
        """The spans of each lane that is used."""
        tracks = {
            lane: tuple(span for span in self.spans if span.lane == lane) for lane in LANES
        }
        return {lane: spans for lane, spans in tracks.items() if spans}

    @property
    def categories(self) -> list[str]:
        """The categories of memory that are used at some moment."""
        used_names = {name for moment in self.timeline for name in moment.memory}
        return [name for name in CATEGORIES if name in used_names]

    @property
    def binds(self) -> str:
        """Which resource limits the step, as a sentence: memory, communication or compute.

        Memory does if the peak is over the budget; communication if the rank waits for more than a
        quarter of the step; otherwise compute.
        """
        if not self.fits:
            largest, size = max(self.by_category.items(), key=lambda item: item[1])
            return (
                f"Memory binds: the peak, {table.size(self.peak)} in the "
                f"{moment_text(self.peak_moment)}, is {table.size(self.peak - self.budget)} over the "
                f"budget; {largest} take {table.share(size, self.peak)} of it."
            )
        wait_text = f"the rank waits for collectives in {_of_step(self.exposed, self)}"
        # Note: a few waits are usual: the first gather of a step has nothing to hide behind.
        is_communication = self.exposed > _SHARE_THAT_BINDS * self.step_time
        return f"{'Communication' if is_communication else 'Compute'} binds: {wait_text}."

    def source_of(self, name: str) -> str:
        """Return how far you can trust a number: a field, or a category of memory."""
        if name in self.sources:
            return self.sources[name]
        if name in _OF_TIME:
            # Note: the report doesn't name it, so it's the source of the sum of all spans.
            return source_of_sum((span.seconds, span.source) for span in self.spans)
        return _SOURCES.get(name, "traced")

    def to_perfetto(self, path: str | Path) -> Path:
        """Write a trace for https://ui.perfetto.dev to ``path`` (``.json``), and return it."""
        facts = {
            "plan": self.plan.fingerprint(), "mesh": mesh_text(self.plan.mesh_axes), "hardware": self.hardware,
            "peak bytes": self.peak, "step seconds": self.step_time,
        }  # fmt: skip
        events = list(_trace_events(self))
        trace = {"displayTimeUnit": "ms", "otherData": facts, "traceEvents": events}
        Path(path).write_text(json.dumps(trace), encoding="utf-8")
        return Path(path)

    def _parts(self) -> Iterator[Part]:
        yield _summary(self)
        yield memory_table(
            self, f"Memory at the peak, in the {moment_text(self.peak_moment)}"
        )
        yield unit_table("By unit, memory that belongs to units", by_unit(self))
        if any(self.reserved) and self.reserved_source:
            yield f"Reserved memory: {self.reserved_source}."
        if (
            any(unit.offload for unit in self.plan.unit_list)
            and self.options.get("optimizer") is not None
        ):
            yield "Offload: the optimizer's update of offloaded shards runs on the host, and the step time leaves it out."
        asked_budget = self.options.get("budget")
        if isinstance(asked_budget, int) and asked_budget > self.budget:
            yield f"Budget: {table.size(asked_budget)} is more than the device has, so its memory counts."
        # Note: in use it fits, but the allocator may not.
        if self.fits and self.reserved[1] >= _FULL * self.budget:
            reserved_share = table.share(self.reserved[1], self.budget)
            yield (
                f"Slow allocations: the allocator may reserve {reserved_share} of the budget. A full one frees "
                "what it does not use and waits for the device, which the step time leaves out."
            )


def moment_text(moment: Moment) -> str:
    """Return a moment as text, such as ``backward of blocks.3``."""
    words = _MOMENTS.get(moment.what, moment.what)
    if moment.what in _OF_STEP:
        return words
    # Note: the name of a group is the names of all its modules.
    first_name, *others = (moment.unit or "(root)").split("+")
    return f"{words} of {first_name}{'+…' if others else ''}"


def rate_text(report: Report) -> str:
    """Return a rank's tokens per second as text."""
    rate = report.tokens_per_second
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def left_text(budget: int, peak: int) -> str:
    """Return how far a peak is below or above a budget, such as ``1.5 GiB left``."""
    return f"{table.size(abs(budget - peak))} {'left' if peak <= budget else 'too little'}"


def memory_table(
    report: Report, title: str, beside: Mapping[str, int] | None = None
) -> Table:
    """Return the memory at the peak as a table, by category, with further bytes beside it."""
    sizes = {**report.by_category, **(beside or {})}
    total = sum(sizes.values())
    table_rows = [
        [category, table.size(size), table.share(size, total), report.source_of(category)]
        for category, size in sizes.items()
    ]
    total_row = ["total", table.size(total), table.share(total, total), ""]
    return Table(title, ["category", "bytes", "share", "source"], table_rows, total_row)


def _summary(report: Report) -> Table:
    table_rows = []

    def row(quantity: str, value: str, note: str = "", source: str | None = None) -> None:
        number_name = quantity.lower().replace(" ", "_")
        table_rows.append([quantity, value, note, source or report.source_of(number_name)])

    row("peak", table.size(report.peak), moment_text(report.peak_moment))
    if report.reserved != (0, 0):
        low, high = map(table.size, report.reserved)
        row("reserved", f"{low} – {high}", "held by a caching allocator")
    source, note = (
        report.sources.get("budget", "given"),
        left_text(report.budget, report.peak),
    )
    if source != "given":
        note = f"the device's memory, {note}"
    row("budget", table.size(report.budget), note, source)
    row("step time", table.duration(report.step_time))
    row("exposed", table.duration(report.exposed), _of_step(report.exposed, report))
    for track, spans in report.tracks.items():
        busy_seconds = sum(span.seconds for span in spans)
        if busy_seconds:
            row(
                f"{track} lane",
                table.duration(busy_seconds),
                _of_step(busy_seconds, report),
                report.source_of("step_time"),
            )
    if report.tokens:
        tokens = f"{table.count(report.tokens)} a rank and step"
        row("tokens per second", rate_text(report), tokens)
    if report.mfu:
        row("MFU", f"{100 * report.mfu:.1f} %", "model FLOPs of the hardware's peak")
    for axis, size in report.traffic.items():
        # Note: "traffic along shard" is no name of a number, so the row needs its source.
        row(
            f"traffic along {axis}",
            table.size(size),
            "sent by a rank in a step",
            report.source_of("traffic"),
        )
    plan = report.plan
    title = f"Report of plan {plan.fingerprint()} for {mesh_text(plan.mesh_axes)}, {report.hardware}"
    return Table(
        f"{title}. {report.binds}", ["quantity", "value", "note", "source"], table_rows
    )


def _of_step(seconds: float, report: Report) -> str:
    return f"{table.share(seconds, report.step_time)} of the step"


def unit_table(
    title: str, new_uses: Sequence[UnitUse], *old_uses: Sequence[UnitUse]
) -> Table:
    """Return the use of each unit as a table, and how it moved from that of an older report."""
    reports = [{use.names: use for use in uses} for uses in (new_uses, *old_uses)]
    all_uses = {names: use for uses in reports for names, use in uses.items()}
    header, table_rows, total_row = (
        ["unit"],
        [[use.title] for use in all_uses.values()],
        ["total"],
    )
    for column, number, text in COLUMNS:
        header += [column, *("±" for _ in old_uses)]
        numbers = [
            [number(uses[names]) if names in uses else 0 for names in all_uses]
            for uses in reports
        ]
        for row, *cell_numbers in zip(table_rows, *numbers, strict=True):
            row += moved_cells(text, *cell_numbers)
        total_row += moved_cells(text, *map(sum, numbers))
    return Table(
        f"{title}; a row n × has the sum over n equal units", header, table_rows, total_row
    )


def moved_cells(text: Callable[[Any], str], new: Any, *old: Any) -> list[str]:
    """Return a number as text, and how it moved from an older one."""
    return [text(new), *(table.signed(new - number, text) for number in old)]


# --- unit by unit ---------------------------------------------------------------------------------

_NO_UNIT = "(no unit)"


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


def by_unit(
    report: Report, key: Callable[[UnitPlan], Hashable] | None = None
) -> tuple[UnitUse, ...]:
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
    compute, communication = defaultdict[str, float](float), defaultdict[str, float](float)
    for span in report.spans:
        # Note: spans of the loss and the optimizer name no unit, and neither does the root of a
        # plan that has no root unit.
        is_whole = span.unit == "" and (
            span.what in ("loss", "optimizer") or "" not in units
        )
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


def recomputed_units(report: Report) -> set[str]:
    """Return the names of the units with modules that backward recomputes."""
    recomputed_modules = set(report.remat)
    return {
        unit.name
        for unit in report.plan.unit_list
        if recomputed_modules.intersection((unit.name, *unit.members))
    }


# --- a trace file ---------------------------------------------------------------------------------

TOTAL = "memory"  # name of the counter of all categories
_MICROSECONDS = 1e6


def _trace_events(report: Report) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace: names, spans, and counters."""
    tracks, categories = report.tracks, report.categories

    def named(name: str, value: str, **place: int) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": 0, **place, "args": {"name": value}}

    # Note: names (``M``) come first, because viewers sort threads by them. Then come spans (``X``)
    # and counters (``C``), in microseconds.
    yield named("process_name", "a rank")
    for thread, track in enumerate(tracks):
        yield named("thread_name", track, tid=thread)
    for thread, spans in enumerate(tracks.values()):
        for span in spans:
            yield {
                "ph": "X", "name": f"{span.what} {span.unit or '(root)'}", "cat": span.lane, "pid": 0,
                "tid": thread, "ts": span.begin * _MICROSECONDS, "dur": span.seconds * _MICROSECONDS,
                "args": {"unit": span.unit, "bytes": span.bytes, "flops": span.flops, "source": span.source},
            }  # fmt: skip
    values_before: dict[str, int] = {}
    for moment in report.timeline:
        current_values = {TOTAL: moment.total}
        current_values |= {
            f"{TOTAL}: {name}": moment.memory.get(name, 0) for name in categories
        }
        # Why only where it changes: a counter keeps its value, and 126 blocks have many moments.
        for name, value in current_values.items():
            if values_before.get(name) != value:
                place = {"pid": 0, "ts": moment.seconds * _MICROSECONDS}
                yield {"ph": "C", "name": name, **place, "args": {"bytes": value}}
        values_before = current_values
