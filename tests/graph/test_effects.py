"""The order that operations need: collectives of torch stay in order among those of units."""

from __future__ import annotations

import torch
from torch import fx

from funcshard.graph.effects import communicates


def test_collectives_of_torch_communicate_and_arithmetic_does_not() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    twice = graph.call_function(torch.ops.aten.add.Tensor, (total, total))
    assert [communicates(node) for node in (x, total, twice)] == [False, True, False]
