"""The bytes of a unit's buffers on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.estimate.walk.runtime import sizes_of

PARAMS = {"w": torch.zeros(8), "own": torch.zeros(8)}


@pytest.mark.parametrize(
    ("mesh", "strategy", "repeated"),
    [
        (2, "full_shard", False),
        (2, "no_shard", True),
        ({"replicate": 2, "shard": 2}, "full_shard", True),
        ({"shard": 2, "tensor": 2}, "full_shard", True),
        (1, "full_shard", False),
    ],
)
def test_a_buffer_is_repeated_if_ranks_along_other_axes_hold_the_same(mesh: Any, strategy: str, repeated: bool) -> None:
    plan = fs.make_plan(PARAMS, mesh, strategy=strategy)
    assert [each.repeated for each in sizes_of(plan.units[""], accelerator=False).buffers.values()] == [repeated]


def test_the_slice_that_stays_after_forward_is_of_buffers_that_are_cut() -> None:
    precision = fs.MixedPrecision(param_dtype=torch.bfloat16)
    plan = fs.make_plan(PARAMS, 4, reshard_after_forward=2, local=["own"], precision=precision)
    found = sizes_of(plan.units[""], accelerator=False)
    assert (found.slice, found.uncut, found.gathered) == (8 * 2 // 2, 8 * 2, 2 * 8 * 2)
