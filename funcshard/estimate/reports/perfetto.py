"""A report as a trace file: tracks as threads, memory as counters.

Source: "Trace Event Format", Google, and https://perfetto.dev/docs/getting-started/other-formats.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from funcshard.estimate.walk import CATEGORIES, LANES, Span, Step
from funcshard.plan import mesh_text

TOTAL = "memory"  # name of the counter of all categories

_MICROSECONDS = 1e6


def to_perfetto(report: Step, path: str | Path) -> Path:
    """Write a report as a ``.json`` trace for Perfetto or ``chrome://tracing``; return its path."""
    path = Path(path)
    more_facts = {
        "plan": report.plan.fingerprint(), "mesh": mesh_text(report.plan.mesh_axes), "hardware": report.hardware,
        "rank": report.rank, "peak bytes": report.peak, "step seconds": report.step_time,
    }  # fmt: skip
    trace_data = {
        "displayTimeUnit": "ms",
        "otherData": more_facts,
        "traceEvents": list(trace_events(report)),
    }
    path.write_text(json.dumps(trace_data), encoding="utf-8")
    return path


def trace_events(report: Step) -> Iterator[dict[str, Any]]:
    """Yield the events of a report's trace: names, spans, and counters."""
    process_place = {"pid": report.rank}
    yield {
        "ph": "M",
        "name": "process_name",
        **process_place,
        "args": {"name": f"rank {report.rank}"},
    }
    tracks = tracks_of(report)
    for thread, track in enumerate(tracks):
        track_place = {**process_place, "tid": thread}
        yield {"ph": "M", "name": "thread_name", **track_place, "args": {"name": track}}
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            **track_place,
            "args": {"sort_index": thread},
        }
    # Note: names (``M``) come first, because viewers sort threads by them. Then come spans (``X``)
    # and counters (``C``), in microseconds.
    for thread, spans in enumerate(tracks.values()):
        for span in spans:
            yield {
                "ph": "X", "name": f"{span.what} {span.unit or '(root)'}", "cat": span.lane, **process_place,
                "tid": thread, "ts": span.begin * _MICROSECONDS, "dur": span.seconds * _MICROSECONDS,
                "args": {"unit": span.unit, "bytes": span.bytes, "flops": span.flops, "source": span.source},
            }  # fmt: skip
    category_names = used_categories(report)
    values_before: dict[str, int] = {}
    for moment in report.timeline:
        current_values = {f"{TOTAL}: {name}": moment.memory.get(name, 0) for name in category_names}
        current_values[TOTAL] = moment.total
        moment_time = moment.seconds * _MICROSECONDS
        # Why only where it changes: a counter keeps its value, and 126 blocks have many moments.
        for name in (TOTAL, *current_values):
            if values_before.get(name) != current_values[name]:
                yield {
                    "ph": "C",
                    "name": name,
                    **process_place,
                    "ts": moment_time,
                    "args": {"bytes": current_values[name]},
                }
                values_before[name] = current_values[name]


def used_categories(report: Step) -> list[str]:
    """Return the categories of memory that a report has, the simulator's first."""
    used_names = {
        name for moment in report.timeline for name, size in moment.memory.items() if size
    }
    return [
        *(name for name in CATEGORIES if name in used_names),
        *sorted(used_names.difference(CATEGORIES)),
    ]


def tracks_of(report: Step) -> dict[str, tuple[Span, ...]]:
    """Return the spans of each track, in the order of the lanes."""
    spans_by_track: dict[str, tuple[Span, ...]] = {}
    for lane in [*LANES, *sorted({span.lane for span in report.spans}.difference(LANES))]:
        lane_spans = [span for span in report.spans if span.lane == lane]
        if not _overlap(lane_spans):
            spans_by_track[lane] = tuple(lane_spans)
            continue
        # Note: kinds that overlap, as all-reduces beside reduce-scatters, get a track each.
        for span_kind in dict.fromkeys(span.what for span in lane_spans):
            spans_by_track[f"{lane}: {span_kind}"] = tuple(
                span for span in lane_spans if span.what == span_kind
            )
    return spans_by_track


def _overlap(spans: Sequence[Span]) -> bool:
    ordered_spans = sorted(spans, key=lambda span: (span.begin, span.end))
    return any(
        later_span.begin < earlier_span.end
        for earlier_span, later_span in itertools.pairwise(ordered_spans)
    )
