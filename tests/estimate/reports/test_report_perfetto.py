"""The trace file, read back."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.estimate import Runtime, estimate, profile
from funcshard.estimate.reports.report import TOTAL, Report
from funcshard.estimate.walk import LANES
from tests.estimate.made_reports import plan_of, report_of

REPORTS = {
    "plain": report_of(),
    "remat": report_of(options={"remat": ("blocks.0",)}),
    "bucketed": report_of(plan_of(bucket_bytes=1 << 22)),
}


def written(report: Report, folder: Path) -> dict[str, Any]:
    path = report.to_perfetto(folder / "trace.json")
    assert path == folder / "trace.json"
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", REPORTS)
def test_the_maximum_of_the_memory_counter_is_the_peak_to_the_byte(name: str, tmp_path: Path) -> None:
    report = REPORTS[name]
    counters = defaultdict(list)
    data = written(report, tmp_path)
    for event in data["traceEvents"]:
        if event["ph"] == "C":
            counters[event["name"]].append((event["ts"], event["args"]["bytes"]))
    assert max(size for _, size in counters[TOTAL]) == report.peak == data["otherData"]["peak bytes"]
    for category, size in report.by_category.items():
        assert size in [value for _, value in counters[f"{TOTAL}: {category}"]]
    assert set(counters) == {TOTAL, *(f"{TOTAL}: {name}" for moment in report.timeline for name in moment.memory)}


def test_each_span_is_an_event_of_the_thread_of_its_lane(tmp_path: Path) -> None:
    report = REPORTS["plain"]
    data = written(report, tmp_path)
    assert (data["otherData"]["plan"], data["otherData"]["mesh"]) == (report.plan.fingerprint(), "8 ranks")
    events = data["traceEvents"]
    assert events[0] == {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "a rank"}}
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(threads.values()) == ["compute", "gather", "reduce"]
    found = [event for event in events if event["ph"] == "X"]
    assert len(found) == len(report.spans)
    spans = [span for lane in LANES for span in report.spans if span.lane == lane]
    for event, span in zip(found, spans, strict=True):
        assert threads[event["tid"]] == event["cat"] == span.lane
        assert (event["ts"], event["dur"]) == (span.begin * 1e6, span.seconds * 1e6)
        assert event["args"] == {"unit": span.unit, "bytes": span.bytes, "flops": span.flops, "source": span.source}
    assert found[0]["name"] == "forward blocks.0"


def test_slices_of_a_thread_do_not_overlap_if_all_reduces_run_apart(tmp_path: Path) -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    traced = profile(*fs.make_functional(net), torch.zeros(1, 512))
    plan = fs.make_plan(traced.forms, {"replicate": 8, "shard": 2}, units=list("0123"))
    report = estimate(traced, plan, runtime=Runtime(replicates_apart=True))
    slices = defaultdict(list)
    for event in written(report, tmp_path)["traceEvents"]:
        if event["ph"] == "X":
            slices[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(slices) == 4
    for own in slices.values():
        assert all(after[0] >= before[1] - 1e-6 for before, after in itertools.pairwise(sorted(own)))
    together = sorted(pair for own in list(slices.values())[2:] for pair in own)
    assert any(after[0] < before[1] - 1 for before, after in itertools.pairwise(together))
    assert "replicate lane" in str(report)
