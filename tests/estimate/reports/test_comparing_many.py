"""Many reports as one table."""

from __future__ import annotations

from funcshard.estimate.reports.comparing import tabulate
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
