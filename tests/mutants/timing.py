"""A plugin of pytest that writes how long each test took, and which are slow: ``-p tests.mutants.timing``."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

_seconds: defaultdict[str, float] = defaultdict(float)
_slow: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration
    if "slow" in report.keywords:
        _slow.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # the process that has the reports of all workers
        Path(os.environ["FUNCSHARD_TEST_SECONDS"]).write_text(json.dumps({"seconds": _seconds, "slow": sorted(_slow)}))
