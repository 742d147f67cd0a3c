"""Selective checkpoints: a policy keeps some results of a unit's operations, and the bits stay the same."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import funcshard as fs
from tests.core.units import by_hand, recorded
from tests.module.law import calls_on, check_equal, plain_call, same_bits, sharded_call
from tests.pairwise import crossed
from tests.ranks import on_ranks, run_ranks, run_simulated
from tests.storages import Alive, Log

WIDTH, BLOCKS, ROWS = 6, 3, 6  # square activations: a result kept for another one would have its shape
WRAPPED = "_checkpoint_wrapped_module"
aten = torch.ops.aten


def chosen(policy, ctx, op, *args, **kwargs):
    return policy


def every_second(ctx, op, *args, **kwargs):
    """Keep the results of operations in turn; one policy object serves one region."""
    every_second.count += 1
    return CheckpointPolicy.MUST_SAVE if every_second.count % 2 else CheckpointPolicy.PREFER_RECOMPUTE


every_second.count = 0


POLICIES = {
    **{policy.name: functools.partial(chosen, policy) for policy in CheckpointPolicy},
    "matrix products": [aten.addmm.default, aten.mm.default],
    "views": [aten.t.default, aten.view.default],
    "in turn": every_second,
    # operations that gathers and reductions run too
    "memory": [aten.new_empty.default, aten.clone.default, aten.empty.memory_format, aten.copy_.default],
}


def contexts(policy):
    return functools.partial(create_selective_checkpoint_contexts, POLICIES[policy])


def run_again(policy, f, *args):
    return checkpoint(f, *args, use_reentrant=False, context_fn=contexts(policy)) if policy else f(*args)


class MLP(nn.Module):
    def __init__(self, log):
        super().__init__()
        self.up, self.down, self.log = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), log

    def forward(self, x):
        self.log(self.up.weight)
        scale = x.new_full((), 1.5, dtype=torch.float64).to(x)  # operations with keyword arguments
        return torch.tanh(self.down(torch.tanh(self.up(x)))) * scale


class Block(nn.Module):
    def __init__(self, wrap, log):
        super().__init__()
        self.mlp, self.norm = wrap(MLP(log)), nn.LayerNorm(WIDTH)

    def inner(self, x):
        return x + self.mlp(self.norm(x))

    def forward(self, x, again=None):
        return self.inner(x) if again is None else again(self.inner, x)


class Stack(nn.Module):
    """Blocks with checkpoints in some place; ``policy`` is the policy of these."""

    def __init__(self, place, policy, log):
        super().__init__()
        wrap = functools.partial(checkpoint_wrapper, context_fn=contexts(policy)) if policy else plain
        self.place, self.policy, self.scale = place, policy, nn.Parameter(torch.linspace(1, 2, WIDTH))
        inner, outer = (wrap if place in places else plain for places in (("wrappers",), ("wrappers", "wrapper around")))
        self.blocks = nn.ModuleList(outer(Block(inner, log)) for _ in range(BLOCKS))

    def forward(self, x):
        x, again = x * self.scale, functools.partial(run_again, self.policy)
        if self.place == "around several":
            x = again(nn.Sequential(*self.blocks[:2]), x)
            return again(lambda x: self.blocks[2](x) * self.scale, x)
        for block in self.blocks:
            ways = {"inside": functools.partial(block, again=again), "around": functools.partial(again, block)}
            x = ways.get(self.place, block)(x)
        return x


def plain(module):
    return module


UNITS = [f"blocks.{i}" for i in range(BLOCKS)]
PLACES = {
    "inside": ["blocks.*"],
    "around": ["blocks.*"],
    "around several": ["blocks.*"],
    "wrapper around": [f"blocks.*.{WRAPPED}"],
    "wrappers": ["blocks.*", f"blocks.*.{WRAPPED}.mlp"],  # the outer wrapper is a unit, and around one
}
# Options of predict_events where the suite predicts a checkpoint in that place.
PREDICTED = {
    "inside": {"recomputed": UNITS},
    "around": {"recomputed": UNITS},
    "wrapper around": {"recomputed": [f"{name}.{WRAPPED}" for name in UNITS]},
}


def batch(rank):
    return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH) * (1 + rank)


def build(place, policy, log=None):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Stack(place, policy, Log() if log is None else log)


def check(place, policy, *, remat=(), **options):
    """Check that the model has the bits of the unsharded one, and the predicted collectives."""
    every_second.count = 0
    for call in check_equal(build(place, policy), batch, PLACES[place], bits=True, how={"remat": remat}, **options):
        if place in PREDICTED and not remat:
            assert call.events == call.predicted(**PREDICTED[place])


@pytest.mark.nightly(one_in=5)
@crossed(place=list(PLACES), strategy=["full_shard", "shard_grad_op", "no_shard"], policy=list(POLICIES))
def test_every_policy_in_every_place_changes_no_bit_and_no_collective(place, strategy, policy):
    check(place, policy, strategy=strategy)


def wrapped(mesh, policy):
    return sharded_call(mesh, fs.make_functional(build("wrappers", policy)), batch, PLACES["wrappers"])[:2]


@pytest.mark.slow
def test_the_same_on_real_ranks_whose_collectives_are_operations_that_a_policy_sees():
    losses, grads = plain_call(build("wrappers", "MUST_SAVE"), batch, 2)
    same_bits(run_ranks(wrapped, 2, "matrix products"), [(loss, grads) for loss in losses])


@pytest.mark.parametrize("place", ["inside", "around"])
def test_a_selective_checkpoint_under_remat_changes_no_bit(place):
    check(place, "matrix products", remat=UNITS)


def summed(mesh, policy):
    """Return the gradient of a loss whose checkpoint holds an all-reduce, and the number of all-reduces."""

    def region(w, x):
        y = torch.sin(w * x)
        return torch.cos((y - fs.pmean(y.clone(), mesh)).clone()).exp()

    _, unit, shards = by_hand(
        mesh,
        {"w": torch.linspace(-1, 1, 4)},
        lambda leaves, x: run_again(policy, region, leaves["w"], x).sum(),
        how=fs.reshard,
    )
    found, events = recorded(fs.value_and_grad(lambda s: unit(s[""], torch.ones(3, 4) + mesh.rank)), shards)
    return found, sum(event.kind == "all_reduce" for event in events)


@pytest.mark.parametrize("policy", ["memory", "PREFER_RECOMPUTE"])
def test_an_all_reduce_in_the_region_runs_again_whatever_the_policy_keeps(policy):
    found, wanted = (run_simulated(summed, 2, each) for each in (policy, None))
    for (result, times), (expected, before) in zip(found, wanted, strict=True):
        same_bits(result, expected)
        assert times == before + 1


def kept(place, policy):
    """Return how many activations one rank keeps between forward and backward."""
    left, rows = [], 50  # so that no parameter has the size of an activation

    def program(model, x):
        with Alive(lambda nbytes: nbytes == rows * WIDTH * 4) as alive:
            loss = model(x).square().mean()
        left.append(alive.now().total())
        return loss

    x = torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH)
    calls_on(2, fs.make_functional(build(place, policy)), x, ["blocks.*"], program=program, calls=1)
    return max(left)


@pytest.mark.slow
def test_a_policy_keeps_more_than_full_recomputation_and_less_than_no_checkpoint():
    nothing, full = kept("nothing", None), kept("inside", "PREFER_RECOMPUTE")
    products, everything = kept("inside", "matrix products"), kept("inside", "MUST_SAVE")
    assert products == full + 2 * BLOCKS  # the results of two matrix products of each block
    assert full < products < nothing < everything


@pytest.mark.parametrize(
    ("place", "policy", "alive"),
    [("around", "views", 0), ("inside", "matrix products", 0), ("inside", "views", BLOCKS)],
)
@on_ranks(2)
def test_only_a_policy_inside_a_unit_that_keeps_views_keeps_its_gathered_leaves(mesh, place, policy, alive):
    log, held = Log(), []

    def program(model, x):
        loss = model(x).square().mean()
        held.append(log.alive())
        return loss

    sharded_call(mesh, fs.make_functional(build(place, policy, log)), batch, PLACES[place], program=program)
    assert (held[-1], log.alive()) == (alive, 0)
