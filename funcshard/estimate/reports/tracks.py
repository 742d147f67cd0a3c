"""``tracks_of``: the spans of a step in rows in which none lies above another, for drawing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from funcshard.estimate.walk import LANES, Span, Step


def tracks_of(report: Step) -> dict[str, tuple[Span, ...]]:
    """Return the spans of each track, in the order of the lanes.

    A lane is one track. If spans of a lane overlap, as all-reduces that run beside reduce-scatters
    do, each kind of collective has a track, such as ``"reduce: all_reduce"``.
    """
    spans_by_track: dict[str, tuple[Span, ...]] = {}
    for lane in [*LANES, *sorted({span.lane for span in report.spans}.difference(LANES))]:
        spans = [span for span in report.spans if span.lane == lane]
        if not _overlap(spans):
            spans_by_track[lane] = tuple(spans)
            continue
        for span_kind in dict.fromkeys(span.what for span in spans):
            spans_by_track[f"{lane}: {span_kind}"] = tuple(
                span for span in spans if span.what == span_kind
            )
    return spans_by_track


def _overlap(spans: Sequence[Span]) -> bool:
    ordered = sorted(spans, key=lambda span: (span.begin, span.end))
    return any(
        later_span.begin < earlier_span.end
        for earlier_span, later_span in itertools.pairwise(ordered)
    )
