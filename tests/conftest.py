from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import close_pool


@pytest.fixture(scope="session", autouse=True)
def _workers_end_with_the_session() -> Iterator[None]:
    yield
    close_pool()
