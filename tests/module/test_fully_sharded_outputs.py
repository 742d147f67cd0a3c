"""Backward begins at the output that was computed last."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import funcshard as fs
from tests.core.units import of_module
from tests.ranks import on_ranks


class TwoOutputs(nn.Module):
    """Returns an early and a late output; ``look`` runs when backward is between the late one and its unit."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.first, self.last, self.look = nn.Linear(4, 4), nn.Linear(4, 4), look

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        early = self.first(x)
        late = self.last(early) * 2
        if late.requires_grad:
            late.register_hook(self.look)
        return early * 1, late.tanh()


@on_ranks(2)
def test_backward_begins_at_the_output_that_was_computed_last(mesh: fs.Mesh) -> None:
    started: list[list[str]] = []
    net = TwoOutputs(lambda _: started.append([event.unit for event in events]))
    _, sharded, shards = of_module(mesh, net, ["first", "last"])
    loss = lambda s: sharded(s, {}, torch.ones(2, 4))[1].sum()  # noqa: E731
    for _ in range(2):  # the first call learns the order
        with fs.record_events() as events:
            fs.value_and_grad(loss)(shards)
    assert started[-1] == ["first", "last", "last"]
