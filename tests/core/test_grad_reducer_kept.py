"""Units that stay gathered within one call of ``value_and_grad``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.core.units import of_module, recorded
from tests.ranks import on_ranks


class Unused(nn.Module):
    """Two layers; the loss depends on the first one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.used(x), self.unused(x)


@pytest.mark.parametrize(("stays", "gathers"), [(False, 2), (True, 1)], ids=["freed", "stays"])
@on_ranks(2)
def test_a_unit_that_backward_did_not_reach_ends_with_its_micro_batch_unless_it_stays(
    mesh: fs.Mesh, stays: bool, gathers: int
) -> None:
    options = {"strategy": "shard_grad_op", "reshard_after_backward": not stays}
    _, sharded, shards = of_module(mesh, Unused(), ["used", "unused"], **options)
    evaluate = fs.accumulate(lambda shards, x: sharded(shards, {}, x)[0].sum(), 2)
    _, events = recorded(evaluate, shards, torch.ones(4, 4))
    units = [event.unit for event in events if event.kind == "all_gather"]
    assert units.count("unused") == units.count("used") == gathers
