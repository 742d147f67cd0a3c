"""check_graph sees the faults that a pass may make."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from funcshard.graph.effects import check_graph, check_order, communicates, draws_numbers
from funcshard.graph.step_graph import StepGraph, collective_of, starts_and_waits


def pair(graph: fx.Graph, kind: str, number: int = 0) -> tuple[fx.Node, fx.Node]:
    return [(start, wait) for start, (wait,) in starts_and_waits(graph) if collective_of(start) == kind][number]


def drop_a_wait(graph: fx.Graph) -> None:
    start, wait = pair(graph, "all_gather")
    wait.replace_all_uses_with(start)
    graph.erase_node(wait)


def wait_twice(graph: fx.Graph) -> None:
    _, wait = pair(graph, "reduce_scatter")
    with graph.inserting_after(wait):
        graph.node_copy(wait, lambda each: each)


def use_data_before_the_wait(graph: fx.Graph) -> None:
    start, wait = pair(graph, "all_gather")
    next(iter(wait.users)).replace_input_with(wait, start)


def reorder_two_gathers(graph: fx.Graph) -> None:
    pair(graph, "all_gather", 0)[0].prepend(pair(graph, "all_gather", 1)[0])


def use_a_result_before_it_is_made(graph: fx.Graph) -> None:
    start, wait = pair(graph, "all_gather")
    start.prepend(wait)


def write_to_data_on_its_way(graph: fx.Graph) -> None:
    start, _ = pair(graph, "all_gather", 4)
    shard: Any = start.args[0]
    with graph.inserting_after(start):
        graph.call_function(torch.ops.aten.mul_.Tensor, (shard, 2)).meta["val"] = shard.meta["val"]


def move_a_write_over_a_read(graph: fx.Graph) -> None:
    update, add = (
        next(node for node in graph.nodes if name in str(node.target)) for name in ("_fused_adamw_", "_foreach_add_")
    )
    update.append(add)


FAULTS: dict[str, tuple[Callable[[fx.Graph], None], str]] = {
    "a wait is dropped": (drop_a_wait, "is waited for 0 times, not once"),
    "a collective is waited for twice": (wait_twice, "is waited for 2 times, not once"),
    "data is used before the wait": (use_data_before_the_wait, "is used before its wait: by"),
    "two gathers are in another order": (reorder_two_gathers, "collectives are in another order"),
    "a result is used before it is made": (use_a_result_before_it_is_made, "no longer runs after all_gather"),
    "a shard is written to while it is sent": (write_to_data_on_its_way, "which has not been waited for"),
    "a write moves over a read": (move_a_write_over_a_read, "no longer runs after .*, on whose result, memory"),
}


def check(graph: fx.Graph, before: fx.Graph) -> None:
    check_order(graph, before)
    check_graph(graph)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(full_shard: Any, fault: str) -> None:
    plant, words = FAULTS[fault]
    before = full_shard.graph
    broken = before.copy()
    check(broken.graph, before.graph)
    plant(broken.graph)
    with pytest.raises(ValueError, match=words):
        check(broken.graph, before.graph)


@pytest.mark.slow
def test_a_change_by_a_user_is_checked_too(full_shard: Any) -> None:
    def late(step_graph: StepGraph) -> StepGraph:
        new = step_graph.copy()
        _, wait = pair(new.graph, "all_gather")
        new.graph.output_node().prepend(wait)
        return new

    with pytest.raises(ValueError, match="which does not come before it"):
        full_shard.changed(late)


def test_random_numbers_keep_their_order() -> None:
    before = fx.Graph()
    x = before.placeholder("x")
    before.output([before.call_function(torch.ops.aten.bernoulli.p, (x, p)) for p in (0.1, 0.2)])
    for node in before.nodes:
        node.meta["val"] = torch.ones(2)
    after = copy.deepcopy(before)
    _, one, other, _ = after.nodes
    other.append(one)
    with pytest.raises(ValueError, match="no longer runs after bernoulli"):
        check_order(after, before)


def test_collectives_of_torch_communicate_and_arithmetic_does_not() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    twice = graph.call_function(torch.ops.aten.add.Tensor, (total, total))
    assert [communicates(node) for node in (x, total, twice)] == [False, True, False]


def test_attention_draws_numbers_for_dropout_alone() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    nodes = [graph.call_function(attention, (x, x, x, dropout)) for dropout in (0.0, 0.5)]
    assert [draws_numbers(node) for node in nodes] == [False, True]
