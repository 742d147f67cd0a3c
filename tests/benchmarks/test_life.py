"""Every row of the races besides the step runs, and both sides compute the same; no test asserts a ratio."""

from __future__ import annotations

import pytest

from benchmarks.life import racing
from benchmarks.life.__main__ import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("server_of_forks")]


@pytest.mark.nightly
def test_every_row_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = main(["--tiny", "--rounds", "1"])
    shown = capsys.readouterr().out
    names = [name for file in racing.FILES for name in racing.cases_of(file)]
    assert {result.case.name: result.error for result in found} == dict.fromkeys(names, "")
    assert all(result.turns[side][0].seconds > 0 for result in found for side in racing.SIDES)
    assert all(result.case.title in shown for result in found)
