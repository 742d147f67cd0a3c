"""The cost of a graph is that of the step: FLOPs, bytes, and bytes on the mesh's axes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import funcshard as fs
from benchmarks.fake_ranks import fake_mesh
from funcshard._utils import table
from funcshard.graph.memory import cost_of
from tests.graph.linear import BATCH, made
from tests.graph.test_traced import CASES, batch_of
from tests.graph.test_traced import made as made_net


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize("case", ["remat, dropout", "micro-batches, reduced once"])
def test_flops_and_collectives_are_those_of_the_step(case: str) -> None:
    ranks, options = CASES[case]
    mesh = fake_mesh(ranks if isinstance(ranks, dict) else {"shard": ranks})
    step, state = made_net(mesh, **options)
    batch = batch_of(mesh, 0)
    cost = fs.trace(step, state, batch).cost()
    state, _ = step(state, batch)
    with FlopCounterMode(display=False) as counter, fs.record_events() as events:
        step(state, batch)
    assert cost.flops == counter.get_total_flops() > 0
    assert [*cost.events] == events
    assert "<table" in cost._repr_html_()
    for axis, kind in {(event.axis, event.kind) for event in events}:
        sent = [event.traffic for event in events if (event.axis, event.kind) == (axis, kind)]
        row = next(line.split() for line in str(cost).splitlines() if line.split()[:2] == [axis, kind])
        assert row[2] == str(len(sent))
        assert " ".join(row[5:]) == table.size(sum(sent))


def test_each_kind_of_operation_moves_the_bytes_of_its_tensors() -> None:
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3)
    view = graph.call_function(aten.view.default, (x, [6]))  # 0
    added = graph.call_function(aten.add.Tensor, (view, view))  # 3 tensors of 24 bytes
    into = graph.call_function(aten.copy_.default, (added, view))  # 2 tensors: the old data is not read
    more = graph.call_function(aten.add_.Tensor, (into, 1))  # 2 tensors
    graph.call_function(aten.empty_like.default, (more,))  # 0
    graph.call_function(aten._foreach_mul_.Scalar, ([more], 2))  # 2 tensors
    graph.output([more])
    for node in graph.nodes:
        if node.op == "call_function":
            args = torch.fx.node.map_arg(node.args, lambda each: each.meta["val"])
            node.meta["val"] = node.target(*args)
    step_graph: Any = fs.trace(*made(fs.Mesh()), BATCH).graph
    assert cost_of(dataclasses.replace(step_graph, graph=graph)).bytes == 24 * (3 + 2 + 2 + 2)


@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_operations_without_a_result_have_a_cost_on_one_rank(option: str) -> None:
    optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1, **{option: True})
    assert fs.trace(*made(fs.Mesh(), optimizer=optimizer), BATCH).cost().bytes > 0
