"""A report as text and as HTML."""

from __future__ import annotations

import dataclasses
import re

import pytest

from funcshard.estimate.machine import SOURCES
from funcshard.estimate.reports.report import Report, moment_text
from tests.estimate.made_reports import MIB, moment, report_of

REPORT = report_of()
OVER_BUDGET = """Memory binds: the peak, 19.4 MiB in the backward of blocks.3, is 9.4 MiB over the budget; \
activations take 61.9 % of it."""


def rows_of(report: Report, number: int) -> dict[str, list[str]]:
    """Return the rows of one of the tables, by their first cell."""
    lines = str(report).split("\n\n")[number].splitlines()
    cells = [re.split(r"\s{2,}", line) for line in lines[3:] if set(line) != {"─"}]
    return {row[0]: row[1:] for row in cells}


def test_the_summary_has_each_number_with_its_source() -> None:
    rows = rows_of(REPORT, 0)
    assert rows["peak"] == ["19.4 MiB", "backward of blocks.3", "traced"]
    assert rows["reserved"] == ["19.8 MiB – 23.3 MiB", "held by a caching allocator", "calibrated"]
    assert rows["budget"] == ["80.0 MiB", "60.6 MiB left", "given"]
    assert rows["step time"] == ["162.5 ms", "calibrated"]
    assert rows["exposed"] == ["10.0 ms", "6.2 % of the step", "extrapolated"]
    assert rows["compute lane"][:2] == ["120.0 ms", "73.8 % of the step"]
    assert rows["tokens per second"] == ["25,206", "4,096 a rank and step", "extrapolated"]
    assert rows["MFU"] == ["0.6 %", "model FLOPs of the hardware's peak", "extrapolated"]
    assert rows["traffic along shard"] == ["22.8 MiB", "sent by a rank in a step", "exact"]
    assert all(row[-1] in (*SOURCES, "a source", "given") for row in rows.values())


def test_memory_at_the_peak_adds_up_and_units_are_folded() -> None:
    memory = rows_of(REPORT, 1)
    assert list(memory) == [*REPORT.by_category, "total"]
    assert memory["activations"] == ["12.0 MiB", "61.9 %", "traced"]
    assert memory["total"] == ["19.4 MiB", "100.0 %"]
    assert rows_of(REPORT, 2)["4 × blocks.*"] == ["14.0 MiB", "21.0 MiB", "120.0 ms", "50.0 ms"]
    assert rows_of(REPORT, 2)["total"] == ["14.0 MiB", "22.8 MiB", "120.0 ms", "50.0 ms"]


@pytest.mark.parametrize(("tokens", "rate"), [(1, "0.308"), (16, "4.92"), (4096, "1,260")])
def test_few_tokens_a_second_are_no_round_number(tokens: int, rate: str) -> None:
    assert rows_of(dataclasses.replace(REPORT, tokens=tokens, step_time=3.25), 0)["tokens per second"][0] == rate


def test_rows_without_a_number_are_left_out() -> None:
    bare = dataclasses.replace(REPORT, tokens=0, flops=0, reserved=(0, 0), spans=())
    assert list(rows_of(bare, 0)) == ["peak", "budget", "step time", "exposed", "traffic along shard"]


@pytest.mark.parametrize(("budget", "warned"), [(40, False), (25, False), (24, True), (20, True), (19, False)])
def test_a_report_warns_of_an_allocator_that_runs_full(budget: int, warned: bool) -> None:
    report = dataclasses.replace(REPORT, budget=budget * MIB)  # peak 19.4 MiB, up to 23.3 MiB reserved
    words = "Slow allocations: the allocator may reserve"
    assert (words in str(report)) == (words in report._repr_html_()) == warned


def test_html_has_the_tables_of_the_text() -> None:
    html = REPORT._repr_html_()
    assert html.count("<table") == 3
    cells = [cell.strip() for line in str(REPORT).splitlines() for cell in re.split(r"\s{2,}", line)]
    assert all(cell.replace("'", "&#x27;") in html for cell in cells if set(cell) - set("─"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budget": 10 * MIB}, OVER_BUDGET),
        ({"exposed": 0.08125}, "Communication binds: the rank waits for collectives in 50.0 % of the step."),
        ({}, "Compute binds: the rank waits for collectives in 6.2 % of the step."),
    ],
)
def test_the_title_says_what_binds(changes, words) -> None:  # type: ignore[no-untyped-def]
    report = dataclasses.replace(REPORT, **changes)
    assert report.binds == words
    assert str(report).splitlines()[0].endswith(words)


@pytest.mark.parametrize(
    ("name", "given", "source"),
    [
        ("peak", {}, "traced"),
        ("peak", {"peak": "calibrated"}, "calibrated"),
        ("shards", {}, "exact"),
        ("communicators", {}, "calibrated"),
        ("activations", {}, "traced"),
        ("step_time", {}, "extrapolated"),  # the weakest source of its spans
        ("traffic", {}, "exact"),
    ],
)
def test_a_number_has_the_weakest_source_of_its_parts(name: str, given: dict[str, str], source: str) -> None:
    assert dataclasses.replace(REPORT, sources=given).source_of(name) == source


def test_moments_are_named_by_what_runs_and_the_unit() -> None:
    assert moment_text(moment(0.0, "backward", "", {})) == "backward of (root)"
    assert moment_text(moment(0.0, "backward", "experts.0+experts.1", {})) == "backward of experts.0+…"
    assert moment_text(moment(0.0, "reduced", "a", {})) == "end of the reduction of a"
    assert [moment_text(moment(0.0, what, "", {})) for what in ("optimizer", "end")] == ["optimizer", "end of the step"]
