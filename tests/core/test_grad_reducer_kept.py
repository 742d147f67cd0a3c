"""Units that stay gathered within one call of ``value_and_grad``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.core.units import of_module, recorded
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
        options = {"strategy": "shard_grad_op", "reshard_after_backward": not stays}
        _, sharded, shards = of_module(mesh, Unused(), ["used", "unused"], **options)
        evaluate = fs.accumulate(lambda shards, x: sharded(shards, {}, x)[0].sum(), 2)
        _, events = recorded(evaluate, shards, torch.ones(4, 4))
        return [event.unit for event in events if event.kind == "all_gather"]

    for units in run_simulated(main, 2):
        assert units.count("unused") == units.count("used") == gathers
