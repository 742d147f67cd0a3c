"""The memory of a graph is that of a run, as a count of all storages sees it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from benchmarks.fake_ranks import fake_mesh
from benchmarks.storages import GATHERED, Storages
from tests.graph import linear
from tests.module.law import Runs


def residual(*blocks: nn.Module) -> nn.Module:
    return Runs(lambda net, x: functools.reduce(lambda x, block: x + block(x), net.blocks, x), blocks=nn.ModuleList(blocks))


def made(*, step_options: dict[str, Any] | None = None, **options: Any) -> tuple[Any, fs.TrainState]:
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
    given: Any = {"module": residual(*blocks), "units": ["blocks.*"], "plan": options, "optimizer": optimizer}
    return linear.made(fake_mesh({"shard": 4}), linear.squares, **given, **(step_options or {}))


def measured(step: Any, state: fs.TrainState, batch: torch.Tensor) -> tuple[int, int]:
    """Return the peak of the second step, and the most that gathered units hold, in bytes."""
    state, _ = step(state, batch)
    with Storages() as storages:
        storages.hold((state.shards, state.buffers, state.opt_state, batch))
        storages.reset()
        step(state, batch)
    return storages.peak["cpu"], storages.peak[GATHERED]


@pytest.mark.nightly(one_in=4)
@pytest.mark.parametrize(
    ("strategy", "size"), [("full_shard", 128), ("full_shard", 2), ("shard_grad_op", 16), ("no_shard", 128)]
)
def test_the_memory_of_a_graph_is_that_of_a_run_and_not_above_that_of_the_step(strategy: str, size: int) -> None:
    batch = torch.randn(size, 64)
    step, state = made(strategy=strategy)
    traced = fs.trace(step, state, batch)
    found = traced.memory()
    of_run, gathered = measured(traced, fs.copy(state), batch)
    of_step, _ = measured(step, fs.copy(state), batch)
    assert found.peak == pytest.approx(of_run, rel=0.05)
    assert of_run <= of_step
    assert found.peak_gathered == gathered
    assert found.donated > 0.9 * found.outputs
    assert found.peak == found.arguments + found.temporary
    assert "peak gathered" in str(found)
