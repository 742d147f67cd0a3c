from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.hostile.campaign import FULL, Campaign
from tests.hostile.nursery import in_nursery


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hostile", "the hostile campaign, python -m pytest tests/hostile -m hostile")
    group.addoption("--hostile-seed", type=int, default=1, help="seed of the first round of each campaign")
    group.addoption(
        "--hostile-rounds",
        type=lambda text: FULL if text == "full" else int(text),
        help="rounds of each campaign; 'full' for all (default: a short part)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("hostile"):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(0))  # each round has its own limit


@pytest.fixture
def campaign(request: pytest.FixtureRequest) -> Iterator[Campaign]:
    option = request.config.getoption  # pytest knows the options if it was told to run this folder
    if hasattr(request.module, "in_nursery") and sys.platform == "linux":
        in_nursery(int, limit=300.0)  # the process that nurseries are forked from imports torch, before any round
    found = Campaign(request.node.nodeid, option("--hostile-seed", 1), option("--hostile-rounds", None))
    yield found
    if found.counts:
        print(f"\n{found.row()}")
