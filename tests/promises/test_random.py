"""Random numbers: one stream on each rank, the same numbers in recomputation, and repeatable runs."""

from __future__ import annotations

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

import funcshard as fs
from tests.ranks import run_ranks, run_simulated

WIDTH = 6
UNITS = ["0", "1", "2"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.linear(x)))


def same_bits(found, expected):
    optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), found, expected)


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


def masks(mesh, each_its_own):
    torch.manual_seed(5 + mesh.rank if each_its_own else 5)
    plan = fs.make_plan({"w": torch.ones(8)}, mesh)
    return fs.unshard(lambda leaves: F.dropout(leaves["w"]), plan.units[""], mesh)(
        fs.shard({"w": torch.ones(8)}, plan, mesh)[""]
    )


def test_ranks_draw_the_same_masks_from_one_seed_and_others_from_seeds_of_their_own():
    first, second = run_simulated(masks, 2, False)
    assert torch.equal(first, second)
    first, second = run_simulated(masks, 2, True)
    assert not torch.equal(first, second)


def noisy(x):
    return F.dropout(torch.sin(x), 0.5) * torch.rand_like(x)


X = torch.linspace(-1, 1, 30).view(5, 6)
UNDER = {
    "autograd": lambda f: torch.autograd.grad(f(x := X.clone().requires_grad_()).sum(), x),
    "grad": lambda f: grad(lambda x: f(f(x)).sum())(X),
    "grad of grad": lambda f: grad(lambda x: grad(lambda y: f(y).square().sum())(x).square().sum())(X),
    "vmap, the same for each": lambda f: vmap(grad(lambda x: f(x).sum()), randomness="same")(X),
    "vmap, different for each": lambda f: vmap(grad(lambda x: f(x).sum()), randomness="different")(X),
    "grad of vmap": lambda f: grad(lambda x: vmap(f, randomness="different")(x).sum())(X),
}


@pytest.mark.parametrize("case", UNDER)
def test_transforms_of_a_rematerialised_function_see_one_stream(case):
    found = []
    for f in (noisy, fs.remat(noisy), fs.remat(fs.remat(noisy))):
        torch.manual_seed(2)
        found.append((UNDER[case](f), torch.rand(2)))
    torch.testing.assert_close(found[1:], found[:1] * 2, rtol=1e-6, atol=1e-7)


def test_vmap_that_allows_no_random_numbers_allows_none_in_a_rematerialised_function():
    with pytest.raises(RuntimeError, match="vmap: called random operation while in randomness error mode"):
        vmap(fs.remat(noisy))(X)
