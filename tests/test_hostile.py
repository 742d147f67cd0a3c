"""The helpers of the hostile campaign see the faults that they are there for."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

import funcshard as fs
from tests.hostile.blame import outcome_of
from tests.hostile.campaign import FULL, Campaign
from tests.hostile.nursery import check_nothing_left, in_nursery, needs_linux, open_files, spawn, wait_all
from tests.hostile.pauses import Pauses


def round_of_chance(draw: Random) -> dict[str, int]:
    number = draw.randrange(1000)
    assert number != Random(4).randrange(1000), f"found {number}"
    return {"numbers": 1}


def test_a_round_that_fails_is_named_with_the_command_that_repeats_it_alone() -> None:
    campaign = Campaign("tests/hostile/test_x.py::test_y", seed=2)
    with pytest.raises(AssertionError, match="found") as caught:
        campaign.run(round_of_chance, short=5, full=100, limit=5.0)
    words = "python -m pytest 'tests/hostile/test_x.py::test_y' -m hostile --hostile-seed 4 --hostile-rounds 1"
    assert words in str(caught.value)
    assert campaign.row().startswith("| x: y | 2–6 | 4 numbers | 1 | ")
    assert campaign.counts == {"rounds": 5, "numbers": 4}
    with pytest.raises(AssertionError, match="found"):
        Campaign("", seed=4, rounds=1).run(round_of_chance, short=5, full=100, limit=5.0)
    whole = Campaign("", seed=5, rounds=FULL)
    whole.run(round_of_chance, short=5, full=20, limit=5.0)
    assert whole.counts["rounds"] == 20


def test_a_round_that_hangs_ends_at_its_limit() -> None:
    with pytest.raises(AssertionError, match=r"a round hangs: it has not ended within [\d.]+ s"):
        Campaign("x", rounds=1).run(lambda draw: time.sleep(60), short=1, full=1, limit=0.1)


ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "an error of ours": (lambda: fs.make_plan({"w": 1}, 1), ""),
    "an error of the system that names its file": (lambda: open("/nowhere/at/all"), ""),  # noqa: SIM115
    "an error of Python inside": (lambda: json.loads("{"), "was not raised by this library"),
    "an error without words": (lambda: (_ for _ in ()).throw(ValueError()), "without words"),
    "an error that is not for users": (lambda: {}["a"], "KeyError is no error for users"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_ours_are_told_from_others(name: str) -> None:
    call, words = ERRORS[name]
    if words:
        with pytest.raises(AssertionError, match=words):
            outcome_of(call, "what was called")
    else:
        assert isinstance(outcome_of(call, "what was called"), Exception)


def hang(enter: Callable[[], None]) -> None:
    enter()
    time.sleep(60)


def leave_a_child(enter: Callable[[], None]) -> None:
    if not os.fork():
        time.sleep(60)
    enter()
    raise ValueError("the end")


def said_by(call: Callable[[], object]) -> str:
    with pytest.raises(AssertionError) as caught:
        call()
    return str(caught.value)


def look_after(folder: str) -> list[str]:
    """Plant a hang, a child that is left, and an open file; return what is said of each."""
    before = open_files()
    hanging = spawn(hang, log=Path(folder) / "hang.log")
    assert hanging.wait_for_phase(10.0)
    with Pauses(Random(1), [hanging], 0.01, Counter()):
        said = [said_by(lambda: wait_all([hanging], 0.3)), said_by(lambda: check_nothing_left(before))]
    leaving = spawn(leave_a_child, log=Path(folder) / "leave.log")
    assert leaving.wait_for_phase(10.0)
    (ended,) = wait_all([leaving], 10.0)
    return [*said, f"{ended.code} {ended.error} {ended.fault}", said_by(lambda: check_nothing_left(before, seconds=0.1))]


@pytest.mark.nightly
@needs_linux
def test_a_hang_a_child_and_a_file_that_are_left_are_seen(tmp_path: Path) -> None:
    hangs, file, ended, child = in_nursery(look_after, str(tmp_path), limit=30.0)
    assert "rank [0] hang: they have not ended within 0.3 s" in hangs
    assert "in hang" in hangs, "the stack is missing"
    assert "files are left open" in file, "the pipe of a rank that hung"
    assert ended.startswith("1 ValueError: the end ValueError was not raised by this library")
    assert "processes are left" in child


@pytest.mark.nightly
@needs_linux
def test_a_nursery_that_hangs_is_ended() -> None:
    with pytest.raises(TimeoutError, match=r"sleep has not returned within 0\.2 s"):
        in_nursery(time.sleep, 60, limit=0.2)
