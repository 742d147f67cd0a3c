"""Shards that change between forward and backward: the gradient at the old values, an error, or what nothing shows."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.module.law import Runs
from tests.ranks import run_ranks, run_simulated


def two(again):
    """Return two layers, large enough that ranks of one machine share their gathered memory."""
    around = (lambda f, x: checkpoint(f, x, use_reentrant=False)) if again else lambda f, x: f(x)
    forward = lambda m, x: around(m.b, around(m.a, x).tanh()).square().sum()  # noqa: E731
    return Runs(forward, a=nn.Linear(160, 160), b=nn.Linear(160, 160))


def write(shard):
    with torch.no_grad():
        shard.mul_(2)


def assign_data(shard):
    shard.data = shard.data * 2


def write_through_data(shard):
    shard.data.mul_(2)


CHANGES = {"write": write, "assign .data": assign_data, "write through .data": write_through_data}
OLD, OTHER = "the gradient at the old values", "another gradient"
RESHARDED = "a shard of unit 'b' was modified in place between forward and backward, which would gather other values"
TORCHS = "is a view and its base or another view"
AGAIN, REMAT = (
    "a shard of unit 'b' was modified in place, or got other data",
    "in the arguments of a function under fs.remat",
)
# How backward gets the leaves: what becomes of each change. A write through .data leaves no trace, as in torch.
PROMISED = {
    ("full_shard", "nothing again"): (RESHARDED, OLD, OTHER),
    ("full_shard", "checkpoint"): (RESHARDED, OLD, OTHER),
    ("full_shard", "remat"): (RESHARDED, REMAT, OTHER),
    ("shard_grad_op", "nothing again"): (OLD, OLD, OLD),
    ("shard_grad_op", "checkpoint"): (AGAIN, AGAIN, OTHER),
    ("shard_grad_op", "remat"): (REMAT, REMAT, OTHER),
    ("no_shard", "nothing again"): (TORCHS, OLD, OTHER),
    ("no_shard", "checkpoint"): (AGAIN, AGAIN, OTHER),
    ("no_shard", "remat"): (REMAT, REMAT, OTHER),
}


def outcome(mesh, strategy, how, change):
    torch.manual_seed(0)
    apply, params, buffers = fs.make_functional(two(how == "checkpoint"))
    plan = fs.make_plan(params, mesh, units=["a", "b"], strategy=strategy)
    sharded = fs.fully_shard(apply, plan, mesh, remat=["a", "b"] if how == "remat" else ())
    shards = fs.shard(params, plan, mesh)
    leaves = [shards[unit]["float32"].requires_grad_() for unit in plan.units]
    x = torch.linspace(-1, 1, 320).view(2, 160)
    wanted = torch.autograd.grad(sharded(shards, buffers, x), leaves)
    loss = sharded(shards, buffers, x)
    for leaf in leaves:
        CHANGES[change](leaf)
    try:
        found = torch.autograd.grad(loss, leaves)
    except RuntimeError as error:
        return str(error)
    return OLD if all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)) else OTHER


# Processes share gathered memory.
CASES = [*((run_simulated, *case) for case in PROMISED), (run_ranks, "shard_grad_op", "nothing again")]


@pytest.mark.slow
@pytest.mark.parametrize(("run", "strategy", "how"), CASES)
def test_what_becomes_of_a_change_between_forward_and_backward(run, strategy, how):
    for change, promised in zip(CHANGES, PROMISED[strategy, how], strict=True):
        for found in run(outcome, 2, strategy, how, change):
            assert promised in found, change
