"""Every row of the races besides the step runs, and both sides compute the same; no test asserts a ratio."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.life import racing
from benchmarks.life.__main__ import main
from benchmarks.life.case import Case, Place, Turn
from benchmarks.rank_processes import FailedError

pytestmark = pytest.mark.usefixtures("server_of_forks")


@pytest.mark.nightly
def test_every_row_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = main(["--tiny", "--rounds", "1"])
    shown = capsys.readouterr().out
    names = [name for file in racing.FILES for name in racing.cases_of(file)]
    assert {result.case.name: result.error for result in found} == dict.fromkeys(names, "")
    assert all(result.turns[side][0].seconds > 0 for result in found for side in racing.SIDES)
    assert all(result.case.title in shown for result in found)


def _returns(value: object, seconds: float) -> Callable[[Place], Turn]:
    def make(place: Place) -> Turn:
        def turn() -> object:
            place.record(seconds, seconds)
            return value

        return turn

    return make


def _fails(place: Place) -> Turn:
    raise OSError("the disk is full")


CASES = (
    Case("alike", "things", "peer", 0.5, _returns(1.0, 1.0), _returns(1.00001, 4.0), ranks=(1,)),
    Case("unlike", "things", "peer", 0.5, _returns(1.0, 1.0), _returns(1.1, 4.0), ranks=(1,)),
    Case("fails", "things", "peer", 0.5, _returns(1.0, 1.0), _fails, ranks=(1,)),
)


@pytest.mark.parametrize(
    ("case", "last", "error"),
    [
        (CASES[0], "met", ""),
        (CASES[1], "failed: ", "the sides' results differ: ours (1.0,), theirs (1.1,)"),
        (CASES[2], "failed: OSError: the disk is full", "rank 0 failed in make"),
    ],
    ids=lambda each: each.name if isinstance(each, Case) else "",
)
def test_a_row_says_whether_its_goal_is_met_or_how_it_failed(
    case: Case, last: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(racing, "_start", _Here)
    result = racing.race("", case, 1, rounds=2)
    assert error in result.error
    assert bool(error) == bool(result.error)
    shown = result.row()
    assert shown[-1].startswith(last)
    assert shown[-2] == "≤ 0.50"
    if not error:
        assert shown[3:6] == ["1000.0 ms", "4000.0 ms", "0.25 (0.25–0.25)"]


class _Here:
    """One rank in this process, in place of a group of processes."""

    def __init__(self, size: int, *, fresh: bool = False) -> None:
        self.made: dict[str, Turn] = {}
        self.place = Place(0, 1, Path(os.devnull))

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        pass

    def call(self, method: str, *args: object) -> list[object]:
        if method == "make":
            (case,) = (each for each in CASES if each.name == args[1])
            try:
                self.made = {side: getattr(case, side)(self.place) for side in racing.SIDES}
            except OSError as error:
                raise FailedError(f"rank 0 failed in make:\nOSError: {error}") from None
            return [None]
        self.place.reset()
        value = self.made[str(args[0])]()
        return [(self.place.seconds, self.place.processor, 0, value)]
