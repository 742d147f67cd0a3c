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
