"""The comparison of estimated with measured steps runs; no test asserts how fast this machine is."""

from __future__ import annotations

import json

import pytest

from benchmarks import step_estimate
from funcshard.estimate import load_hardware

QUICK, SLOW, BOTH = [1.0, 1.1, 1.2, 1.3], [2.0, 2.1, 2.2, 2.3], [1.0, 1.9, 2.1, 2.3]


@pytest.mark.parametrize(
    ("estimates", "times", "wrong"),
    [
        ((1.0, 2.0), (QUICK, SLOW), []),
        ((2.0, 1.0), (QUICK, SLOW), [("a", "b")]),
        ((1.0, 2.0), (SLOW, QUICK), [("b", "a")]),
        ((2.0, 1.0), (BOTH, SLOW), []),  # the quartiles overlap
        ((1.0, 1.0), (QUICK, SLOW), []),  # the estimate names no order
    ],
    ids=["right", "wrong", "wrong the other way", "tied", "equal estimates"],
)
def test_misordered_plans_are_found(estimates, times, wrong):
    names = ("a", "b")
    found = step_estimate.misordered(dict(zip(names, estimates, strict=True)), dict(zip(names, times, strict=True)))
    assert list(found) == wrong


@pytest.mark.slow
def test_a_step_is_estimated_for_the_plan_that_races():
    cpu = load_hardware("cpu")
    cut, whole = (step_estimate.estimated("tiny", peer, 2, cpu) for peer in ("full_shard", "no_shard"))
    assert 0 < whole["exposed"] < cut["exposed"] < cut["step"]


@pytest.mark.slow
def test_the_comparison_runs_end_to_end(tmp_path, capfd):
    path = tmp_path / "found.json"
    args = ["--hardware", "cpu", "--shapes", "tiny", "--peers", "full_shard,no_shard", "--rounds", "2"]
    found = step_estimate.main([*args, "--json", str(path)])
    assert json.loads(path.read_text()) == found
    (race,) = found["races"]
    for kind in ("seconds", "processor"):
        assert {peer: len(times) for peer, times in race[kind].items()} == {"full_shard": 2, "no_shard": 2}
        assert all(time > 0 for times in race[kind].values() for time in times)
    out = capfd.readouterr().out
    assert "funcshard full_shard" in out
    assert "The order of the plans is" in out
