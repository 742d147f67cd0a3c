"""Backward begins at the output that was computed last."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import funcshard as fs
from tests.ranks import run_simulated


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


def test_backward_begins_at_the_output_that_was_computed_last() -> None:
    def main(mesh: fs.Mesh) -> list[str]:
        started: list[list[str]] = []
        apply, params, buffers = fs.make_functional(TwoOutputs(lambda _: started.append([event.unit for event in events])))
        plan = fs.make_plan(params, mesh, units=["first", "last"])
        sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
        loss = lambda s: sharded(s, buffers, torch.ones(2, 4))[1].sum()  # noqa: E731
        for _ in range(2):  # the first call learns the order
            with fs.record_events() as events:
                fs.value_and_grad(loss)(shards)
        return started[-1]

    assert run_simulated(main, 2) == [["first", "last", "last"]] * 2
