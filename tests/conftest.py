from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Why before torch is imported, and for processes that tests start: with a worker of xdist on each
# core, threads of small operations mostly wait for each other. It took half of the CPU time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.ranks import SLOW_TESTS, close_pool


def pytest_collection_finish(session: pytest.Session) -> None:
    # Why after the collection: only now it is known which tests are deselected.
    if any(item.get_closest_marker("slow") for item in session.items):
        os.environ[SLOW_TESTS] = "1"


@pytest.fixture(scope="session", autouse=True)
def _workers_end_with_the_session() -> Iterator[None]:
    yield
    close_pool()
