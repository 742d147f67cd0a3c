from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.campaign import FULL, Campaign
from tests.hostile.nursery import in_nursery

_RECORD = "hostile"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hostile", "the hostile campaign, python -m pytest tests/hostile -m hostile")
    group.addoption("--hostile-seed", type=int, default=1, help="seed of the first round of each campaign")
    group.addoption(
        "--hostile-rounds",
        type=lambda text: FULL if text == "full" else int(text),
        help="rounds of each campaign; 'full' for all (default: a short part)",
    )
    group.addoption("--hostile-report", metavar="PATH", help="write what was counted to this file, as JSON")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("hostile"):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(0))  # each round has its own limit


@pytest.fixture
def campaign(request: pytest.FixtureRequest, record_property: Any) -> Iterator[Campaign]:
    option = request.config.getoption  # pytest knows the options if it was told to run this folder
    if hasattr(request.module, "in_nursery") and sys.platform == "linux":
        in_nursery(int, limit=300.0)  # the process that nurseries are forked from imports torch, before any round
    found = Campaign(request.node.nodeid, option("--hostile-seed", 1), option("--hostile-rounds", None))
    yield found
    if found.counts:
        print(f"\n{found.record()}")
        record_property(_RECORD, found.record())


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    path = config.getoption("--hostile-report", None)
    if path is None:
        return
    reports = [report for each in terminalreporter.stats.values() for report in each if hasattr(report, "user_properties")]
    found = [value for report in reports for name, value in report.user_properties if name == _RECORD]
    rows = {row["test"]: row for row in found}
    Path(path).write_text(json.dumps({"campaigns": [rows[test] for test in sorted(rows)]}, indent=1) + "\n")
