"""Units that stay gathered within one call of ``value_and_grad``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.ranks import run_simulated


class Unused(nn.Module):
    """Two layers; the loss depends on the first one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.used(x), self.unused(x)


@pytest.mark.parametrize(("stays", "gathers"), [(False, 2), (True, 1)], ids=["freed", "stays"])
def test_a_unit_that_backward_did_not_reach_ends_with_its_micro_batch_unless_it_stays(stays: bool, gathers: int) -> None:
    def main(mesh: fs.Mesh) -> list[str]:
        apply, params, buffers = fs.make_functional(Unused())
        options = {"strategy": "shard_grad_op", "reshard_after_backward": not stays}
        plan = fs.make_plan(params, mesh, units=["used", "unused"], **options)
        sharded = fs.fully_shard(apply, plan, mesh)
        loss_fn = lambda shards, x: sharded(shards, buffers, x)[0].sum()  # noqa: E731
        with fs.record_events() as events:
            fs.accumulate(loss_fn, 2)(fs.shard(params, plan, mesh), torch.ones(4, 4))
        return [event.unit for event in events if event.kind == "all_gather"]

    for units in run_simulated(main, 2):
        assert units.count("unused") == units.count("used") == gathers
