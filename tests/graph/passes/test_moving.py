"""gather_earlier and wait_later: the order of collectives stays, and memory within its limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.graph.step_graph import collective_of, starts_and_waits
from tests.graph.passes.test_keeping import UNIT
from tests.graph.test_memory import made


def distance(traced: Any, kind: str) -> int:
    """Return how many operations run between starts and waits of a kind, summed up."""
    position = {node: number for number, node in enumerate(traced.graph.graph.nodes)}
    pairs = [(start, wait) for start, (wait,) in starts_and_waits(traced.graph.graph) if collective_of(start) == kind]
    return sum(position[wait] - position[start] for start, wait in pairs)


@pytest.mark.slow
def test_gathers_start_earlier_within_the_peak_of_the_step() -> None:
    traced = fs.trace(*made(strategy="shard_grad_op"), torch.randn(16, 64))
    earlier = fs.passes.gather_earlier(traced)
    assert distance(earlier, "all_gather") > distance(traced, "all_gather")
    assert earlier.events == traced.events
    assert earlier.memory().peak <= traced.memory().peak


@pytest.mark.parametrize(("less", "units"), [(0, 4), (UNIT, 3), (2 * UNIT, 2)])
def test_a_larger_budget_lets_more_units_be_gathered_at_once(full_shard: Any, less: int, units: int) -> None:
    peak = full_shard.memory().peak
    earlier = fs.passes.gather_earlier(full_shard, budget=peak - less)
    assert earlier.memory().peak == peak
    assert earlier.memory().peak_gathered == units * UNIT
    assert earlier.events == full_shard.events


@pytest.mark.slow
def test_by_limits_how_far_a_gather_moves(full_shard: Any) -> None:
    found = [fs.passes.gather_earlier(full_shard, by=by, budget="1GiB") for by in (1, 2, 3)]
    gathered = [each.memory().peak_gathered for each in found]
    assert gathered == [3 * UNIT, 4 * UNIT, 4 * UNIT]
    distances = [distance(each, "all_gather") for each in (full_shard, *found)]
    assert distances == sorted(set(distances))


def test_a_budget_below_the_peak_moves_nothing_where_it_is_exceeded(full_shard: Any) -> None:
    assert str(fs.passes.gather_earlier(full_shard, budget=1)) == str(full_shard)


def test_reductions_are_waited_for_later(full_shard: Any) -> None:
    later = fs.passes.wait_later(full_shard)
    assert distance(later, "reduce_scatter") > distance(full_shard, "reduce_scatter")
    assert later.events == full_shard.events
    assert later.memory().peak <= full_shard.memory().peak
