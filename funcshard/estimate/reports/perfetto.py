"""A report as a trace file: tracks as threads, memory as counters.

Perfetto (https://ui.perfetto.dev) and ``chrome://tracing`` read the file. Its format is the Trace
Event Format: ``X`` events have a duration, ``C`` events are counters, ``M`` events name things, and
times are in microseconds.

Source: "Trace Event Format", Google, and https://perfetto.dev/docs/getting-started/other-formats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from funcshard.estimate.reports.tracks import tracks_of
from funcshard.estimate.walk import CATEGORIES, Step
from funcshard.plan import mesh_text

TOTAL = "memory"  # name of the counter of all categories

_MICROSECONDS = 1e6


def to_perfetto(report: Step, path: str | Path) -> Path:
    """Write a report as a trace for Perfetto or ``chrome://tracing``, and return the file's path.

    Each lane is a thread; two kinds of collectives that overlap in a lane have a thread each.
    Memory has a counter of all bytes, whose maximum equals ``report.peak``, and a counter for each
    category.

    Arguments:
        report: the report.
        path: the file to write. Perfetto opens files that end in ``.json``.

    Returns:
        The path of the file.
    """
    path = Path(path)
    more_facts = {
        "plan": report.plan.fingerprint(), "mesh": mesh_text(report.plan.mesh_axes), "hardware": report.hardware,
        "rank": report.rank, "peak bytes": report.peak, "step seconds": report.step_time,
    }  # fmt: skip
    data = {
        "displayTimeUnit": "ms",
        "otherData": more_facts,
        "traceEvents": list(trace_events(report)),
    }
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def trace_events(report: Step) -> Iterator[dict[str, Any]]:
    """Yield the events of the trace of a report: names first, then spans, then counters."""
    rank_place = {"pid": report.rank}
    yield {"ph": "M", "name": "process_name", **rank_place, "args": {"name": f"rank {report.rank}"}}
    tracks = tracks_of(report)
    for thread, track in enumerate(tracks):
        yield {
            "ph": "M",
            "name": "thread_name",
            **rank_place,
            "tid": thread,
            "args": {"name": track},
        }
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            **rank_place,
            "tid": thread,
            "args": {"sort_index": thread},
        }
    for thread, spans in enumerate(tracks.values()):
        for span in spans:
            yield {
                "ph": "X", "name": f"{span.what} {span.unit or '(root)'}", "cat": span.lane, **rank_place,
                "tid": thread, "ts": span.begin * _MICROSECONDS, "dur": span.seconds * _MICROSECONDS,
                "args": {"unit": span.unit, "bytes": span.bytes, "flops": span.flops, "source": span.source},
            }  # fmt: skip
    yield from _counters(report, rank_place)


def _counters(report: Step, here: dict[str, int]) -> Iterator[dict[str, Any]]:
    # Why only where it changes: a counter keeps its value, and 126 blocks have many moments.
    used = {category for moment in report.timeline for category in moment.memory}
    names = [*(each for each in CATEGORIES if each in used), *sorted(used.difference(CATEGORIES))]
    values_before: dict[str, int] = {}
    for moment in report.timeline:
        current_values = {
            TOTAL: moment.total,
            **{f"{TOTAL}: {name}": moment.memory.get(name, 0) for name in names},
        }
        for name, size in current_values.items():
            if values_before.get(name) != size:
                yield {
                    "ph": "C",
                    "name": name,
                    **here,
                    "ts": moment.seconds * _MICROSECONDS,
                    "args": {"bytes": size},
                }
        values_before = current_values
