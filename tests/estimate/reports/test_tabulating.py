"""Many reports as one table."""

from __future__ import annotations

from typing import Any

import pytest

from funcshard.estimate.reports.tabulating import tabulate
from tests.estimate.made_reports import MIB, plan_of, report_of

REPORTS = {
    "many": report_of(),
    "few": report_of(plan_of(mesh={"replicate": 2, "shard": 4}), budget=2 * MIB),
    "no tokens": report_of(tokens=0, flops=0, budget=None),
}


def test_each_report_is_a_row_with_its_numbers() -> None:
    ((title, header, rows, _),) = tabulate(REPORTS)._parts()
    assert title == "3 reports of one rank and step, h100-8x400gbps"
    found = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert found.keys() == REPORTS.keys()
    assert found["many"]["mesh"] == "8 ranks"
    assert found["few"]["mesh"] == "8 ranks = 2 replicate × 4 shard"
    assert found["many"]["budget"].endswith(" MiB left")
    assert found["few"]["budget"].endswith(" MiB too little")
    assert [found["no tokens"][key] for key in ("budget", "tokens per second", "MFU")] == ["", "", ""]


def test_it_is_shown_as_text_and_as_html() -> None:
    found = tabulate(REPORTS)
    assert str(found) == repr(found)
    assert len(str(found).splitlines()) == 4 + len(REPORTS) + 1
    assert found._repr_html_().count("<tr>") == 1 + len(REPORTS)


@pytest.mark.parametrize(
    ("reports", "kind", "words"),
    [
        pytest.param([report_of()], TypeError, "reports must be a dictionary of names and reports; found list", id="a list"),
        pytest.param(
            {"a": plan_of()}, TypeError, "reports must hold what estimate returned; found Plan at 'a'", id="a plan"
        ),
        pytest.param({}, ValueError, "reports must hold at least one report", id="none"),
    ],
)
def test_other_things_are_refused(reports: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        tabulate(reports)
