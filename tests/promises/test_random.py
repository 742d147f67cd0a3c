"""Random numbers: one stream on each rank, the same numbers in recomputation, and repeatable runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

import funcshard as fs
from tests.core.units import same_bits
from tests.ranks import run_ranks, run_simulated

WIDTH = 6
UNITS = ["0", "1", "2"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.linear(x)))


def train(mesh, each_its_own, remat):
    """Train three steps with dropout; return losses, parameters, and the next numbers of this rank's stream."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        apply, params, buffers = fs.make_functional(nn.Sequential(*(Block() for _ in UNITS)))
    plan = fs.make_plan(params, mesh, units=UNITS)
    sharded = fs.fully_shard(apply, plan, mesh, remat=UNITS if remat else ())
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=0.1)
    step = fs.make_train_step(lambda s, b, x: sharded(s, b, x).square().mean(), optimizer, plan, mesh)
    torch.manual_seed(5 + mesh.rank if each_its_own else 5)
    state, losses = step.init(fs.shard(params, plan, mesh), buffers), []
    for _ in range(3):
        state, metrics = step(state, torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH))
        losses.append(metrics["loss"])
    return losses, fs.gather(state.shards, plan, mesh), torch.rand(3)


STREAMS = pytest.mark.parametrize("each_its_own", [False, True], ids=["one stream", "a stream for each rank"])


@STREAMS
def test_computing_again_draws_the_same_numbers_and_leaves_the_stream_where_it_was(each_its_own):
    same_bits(*(run_simulated(train, 2, each_its_own, remat) for remat in (False, True)))


@pytest.mark.slow
def test_processes_draw_the_numbers_of_simulated_ranks():
    same_bits(run_ranks(train, 3, True, False), run_simulated(train, 3, True, False))


def noisy(x):
    return F.dropout(torch.sin(x), 0.5) * torch.rand_like(x)


def test_vmap_that_allows_no_random_numbers_allows_none_in_a_rematerialised_function():
    with pytest.raises(RuntimeError, match="vmap: called random operation while in randomness error mode"):
        vmap(fs.remat(noisy))(torch.ones(5, 6))
