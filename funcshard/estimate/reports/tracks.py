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
    found: dict[str, tuple[Span, ...]] = {}
    for lane in [*LANES, *sorted({span.lane for span in report.spans}.difference(LANES))]:
        spans = [span for span in report.spans if span.lane == lane]
        if not _overlap(spans):
            found[lane] = tuple(spans)
            continue
        for what in dict.fromkeys(span.what for span in spans):
            found[f"{lane}: {what}"] = tuple(span for span in spans if span.what == what)
    return found


def _overlap(spans: Sequence[Span]) -> bool:
    ordered = sorted(spans, key=lambda span: (span.begin, span.end))
    return any(after.begin < before.end for before, after in itertools.pairwise(ordered))
