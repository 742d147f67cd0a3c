"""Selective checkpoints: a policy keeps some results of a unit's operations, and the bits stay the same."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import funcshard as fs
from tests.module.law import calls_on, plain_call, same_bits, sharded_call
from tests.ranks import run_ranks, run_simulated
from tests.storages import Alive, Log

WIDTH, BLOCKS, ROWS = 6, 3, 6  # square activations: a result kept for another one would have its shape
WRAPPED = "_checkpoint_wrapped_module"
aten = torch.ops.aten


def always(policy):
    return lambda ctx, op, *args, **kwargs: policy


def every_second(ctx, op, *args, **kwargs):
    """Keep the results of operations in turn; one policy object serves one region."""
    every_second.count += 1
    return CheckpointPolicy.MUST_SAVE if every_second.count % 2 else CheckpointPolicy.PREFER_RECOMPUTE


every_second.count = 0


POLICIES = {
    "MUST_SAVE": always(CheckpointPolicy.MUST_SAVE),
    "PREFER_SAVE": always(CheckpointPolicy.PREFER_SAVE),
    "MUST_RECOMPUTE": always(CheckpointPolicy.MUST_RECOMPUTE),
    "PREFER_RECOMPUTE": always(CheckpointPolicy.PREFER_RECOMPUTE),
    "matrix products": [aten.addmm.default, aten.mm.default],
    "views": [aten.t.default, aten.view.default],
    "in turn": every_second,
    # operations that gathers and reductions run too
    "memory": [aten.new_empty.default, aten.clone.default, aten.empty.memory_format, aten.copy_.default],
}
FEW = ("matrix products", "views", "MUST_SAVE")  # keep some results, keep views of leaves, keep all


def contexts(policy):
    return functools.partial(create_selective_checkpoint_contexts, POLICIES[policy])


def selective(f, policy):
    return functools.partial(checkpoint, f, use_reentrant=False, context_fn=contexts(policy))


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
        self.place, self.scale = place, nn.Parameter(torch.linspace(1, 2, WIDTH))
        self.again = (lambda f, x: selective(f, policy)(x)) if policy else lambda f, x: f(x)
        inner, outer = (wrap if place in places else plain for places in (("wrappers",), ("wrappers", "wrapper around")))
        self.blocks = nn.ModuleList(outer(Block(inner, log)) for _ in range(BLOCKS))

    def forward(self, x):
        x, again = x * self.scale, self.again
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


def build(place, policy, log):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Stack(place, policy, log)


def step(mesh, place, policy, strategy="full_shard", remat=()):
    """Return loss and gradients of a second call, and the number of gathered leaves alive after its forward."""
    every_second.count = 0
    log, alive = Log(), []

    def program(model, x):
        loss = model(x).square().mean()
        alive.append(log.alive())
        return loss

    functional, units = fs.make_functional(build(place, policy, log)), PLACES.get(place, ["blocks.*"])
    call = sharded_call(mesh, functional, batch, units, program=program, how={"remat": remat}, strategy=strategy)
    assert log.alive() == 0
    if policy and place in PREDICTED and not remat:
        assert call.events == call.predicted(**PREDICTED[place])
    return (call.loss, {name.replace(f".{WRAPPED}", ""): grad for name, grad in call.grads.items()}), alive[-1]


@functools.cache
def whole(place):
    """Return each of two ranks' loss, and the mean gradient, of the model without shards and checkpoints."""
    return plain_call(build(place, None, Log()), batch, 2)


def check(place, results):
    losses, mean = whole(place)
    for (found, _), loss in zip(results, losses, strict=True):
        same_bits(found, (loss, mean))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("place", PLACES)
def test_every_policy_in_every_place_changes_no_bit_and_no_collective(place, strategy):
    # A policy sees the operations of forward, gathers among them; full_shard has the most of them.
    for policy in POLICIES if strategy == "full_shard" else FEW:
        check(place, run_simulated(step, 2, place, policy, strategy))


@pytest.mark.slow
def test_the_same_on_real_ranks_whose_collectives_are_operations_that_a_policy_sees():
    for policy in FEW:
        check("wrappers", run_ranks(step, 2, "wrappers", policy))


@pytest.mark.parametrize("place", ["inside", "around"])
def test_a_selective_checkpoint_under_remat_changes_no_bit(place):
    check(place, run_simulated(step, 2, place, "matrix products", "full_shard", UNITS))


# --- other collectives in the region --------------------------------------------------------------


def summed(mesh, policy):
    """Return the gradient of a loss whose checkpoint holds an all-reduce, and the number of all-reduces."""
    plan = fs.make_plan({"w": torch.linspace(-1, 1, 4)}, mesh)

    def region(w, x):
        y = torch.sin(w * x)
        return torch.cos((y - fs.pmean(y.clone(), mesh)).clone()).exp()

    inside = selective(region, policy) if policy else region
    unit = fs.reshard(fs.unshard(lambda leaves, x: inside(leaves["w"], x).sum(), plan.units[""], mesh))
    shards = fs.shard({"w": torch.linspace(-1, 1, 4)}, plan, mesh)
    with fs.record_events() as events:
        found = fs.value_and_grad(lambda shards: unit(shards[""], torch.ones(3, 4) + mesh.rank))(shards)
    return found, sum(event.kind == "all_reduce" for event in events)


@pytest.mark.parametrize("policy", ["memory", "MUST_SAVE", "PREFER_RECOMPUTE"])
def test_an_all_reduce_in_the_region_runs_again_whatever_the_policy_keeps(policy):
    found, wanted = (run_simulated(summed, 2, each) for each in (policy, None))
    for (result, times), (expected, before) in zip(found, wanted, strict=True):
        same_bits(result, expected)
        assert times == before + 1


# --- memory ---------------------------------------------------------------------------------------


def kept(place, policy):
    """Return how many activations one rank keeps between forward and backward."""
    left, rows = [], 50  # so that no parameter has the size of an activation

    def program(model, x):
        with Alive(lambda nbytes: nbytes == rows * WIDTH * 4) as alive:
            loss = model(x).square().mean()
        left.append(alive.now().total())
        return loss

    x = torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH)
    calls_on(2, fs.make_functional(build(place, policy, Log())), x, ["blocks.*"], program=program, calls=1)
    return max(left)


@pytest.mark.parametrize("place", ["inside", "around"])
def test_a_policy_keeps_more_than_full_recomputation_and_less_than_no_checkpoint(place):
    nothing, full = kept("nothing", None), kept(place, "PREFER_RECOMPUTE")
    products, everything = kept(place, "matrix products"), kept(place, "MUST_SAVE")
    assert products == full + 2 * BLOCKS  # the results of two matrix products of each block
    assert full < products < nothing < everything


@pytest.mark.parametrize(
    ("place", "policy", "alive"),
    [*(("around", policy, 0) for policy in FEW), ("inside", "matrix products", 0), ("inside", "views", BLOCKS)],
)
def test_only_a_policy_inside_a_unit_that_keeps_views_keeps_its_gathered_leaves(place, policy, alive):
    assert [found for _, found in run_simulated(step, 2, place, policy)] == [alive] * 2
