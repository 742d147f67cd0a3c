"""``reshard_after_forward`` as a number: a few neighbours hold a unit together between forward and backward."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from funcshard._utils import tree
from funcshard.comm import neighbours
from tests.core.units import of_module, requiring_grad, same_bits
from tests.module.law import Runs, calls_on
from tests.ranks import on_ranks, run_ranks, run_simulated
from tests.storages import Alive

WIDTH = 16
UNITS = ["0", "1", "2"]


def plain(block, x):
    return x + block.down(torch.tanh(block.up(x)))


def checkpointed(block, x):
    return checkpoint(plain, block, x, use_reentrant=False)


def block(run=plain):
    return Runs(run, up=nn.Linear(WIDTH, 3 * WIDTH), down=nn.Linear(3 * WIDTH, WIDTH))


def made(run=plain):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Sequential(*[block(run) for _ in range(3)], nn.Linear(WIDTH, 1))


def data(rank):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def train(world, reshard_after_forward, units=UNITS, block=plain, **options):
    """Return what the second of two steps gives on each rank."""
    return calls_on(
        world, fs.make_functional(made(block)), data, units, reshard_after_forward=reshard_after_forward, **options
    )


def same_step(calls, others):
    same_bits([(call.loss, call.grads) for call in calls], [(call.loss, call.grads) for call in others])


HALVES, KEPT = {"reshard_after_forward": 2}, {"reshard_after_forward": False}
INSIDE = fs.Cast(torch.clone, lambda rows: torch.cat([rows[0, :1], rows.flatten()])[1:])  # begins inside its memory
CASES = {  # world, ranks, options
    "a row of a grid": ({"replicate": 2, "shard": 4}, 2, {}),
    "over shard_grad_op": (4, 2, {"strategy": "shard_grad_op"}),
    "in low precision": (4, 2, {"precision": fs.MixedPrecision(param_dtype=torch.bfloat16)}),
    "a group": (4, 2, {"units": [["0", "2"], "1"]}),
    "a unit alone": (4, None, {"units": {"0": {}, "1": HALVES, "2": KEPT}}),
    "with buckets": (4, None, {"units": {"0": {}, "1": {}, "2": HALVES}, "bucket_bytes": 10**6}),
    "six ranks": (6, 3, {}),
    "a cast": (4, 2, {"how": {"cast": lambda unit, buffer: INSIDE}}),
    "a compiled unit": (4, 2, {"how": {"compiler": lambda forward: lambda *args, **kwargs: forward(*args, **kwargs)}}),
}


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("case", CASES)
def test_backward_gathers_from_the_neighbours_as_predicted_and_gives_the_same_bits(case):
    world, ranks, options = CASES[case]
    found = train(world, ranks, **options)
    plain = train(world, None, **{**options, "units": list(options.get("units", UNITS)), "bucket_bytes": 0})
    same_step(found, plain)
    for call, usual in zip(found, plain, strict=True):
        assert call.events == call.predicted()
        small = [event for event in call.events if event.kind == "all_gather" and event.ranks == (ranks or 2)]
        assert {event.axis for event in small} == {"shard"}
        whole = {(e.unit, e.buffer): (e.bytes, e.dtype) for e in usual.events if e.kind == "all_gather"}
        assert all(whole[event.unit, event.buffer] == (event.bytes, event.dtype) for event in small)


def test_between_forward_and_backward_a_rank_holds_its_part_of_a_unit():
    nbytes = 4 * sum(p.numel() for p in block().parameters())

    def main(mesh):
        _, sharded, shards = of_module(mesh, made(), UNITS, reshard_after_forward=2)
        leaves = tree.leaves(requiring_grad(shards))
        with Alive(lambda size: size in (nbytes // 2, nbytes)) as alive:
            out = sharded(shards, {}, data(0))
            held = alive.now()
            torch.autograd.grad(out.sum(), leaves)
            del out
            return held[nbytes // 2], held[nbytes], alive.now().total()

    assert run_simulated(main, 4)[0] == (3, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"block": checkpointed}, {"how": {"remat": ["1"]}}], ids=["inside", "around"])
def test_recomputation_inside_and_around_a_unit_gives_the_same_bits(options):
    same_step(train(4, 2, **options), train(4, True, block=checkpointed))


@on_ranks({"shard": 4, "tensor": 2})
def test_meshes_that_share_the_shard_axis_share_its_neighbours(mesh):
    near = neighbours(mesh, 2)
    of_units = fs.with_collectives(mesh, "shard", all_reduce=lambda tensor, plain: plain.all_reduce(tensor))
    for same in (mesh, mesh["shard"], mesh["shard", "tensor"], mesh["shard"]["shard"], of_units, of_units["shard"]):
        assert neighbours(same, 2) is near
    assert neighbours(mesh["shard"], 4) is neighbours(mesh, 4)  # in the other order
    assert neighbours(mesh["tensor"], 1) is not neighbours(mesh, 1)  # another shard axis, of one rank
    assert near.shard.size == 2


# Ranks on the shard axis, the option, and what a unit has: one rank frees nothing, and all ranks free all.
PLANS = [(8, 4, 4), (8, 1, False), (8, 8, True), (1, 1, False), (4, np.int64(2), 2)]


@pytest.mark.parametrize(("shards", "option", "wanted"), PLANS)
def test_a_number_of_ranks_is_plan_data(shards, option, wanted):
    plan = fs.make_plan({"a": {"w": torch.zeros(9)}}, shards, units=["a"], reshard_after_forward=option)
    assert fs.Plan.from_json(plan.to_json()) == plan
    assert plan.units["a"].reshard_after_forward == wanted
    assert type(plan.units["a"].reshard_after_forward) is type(wanted)
    assert ("over 4 ranks after forward" in str(plan)) == (wanted == 4)


@pytest.mark.slow
def test_on_processes_it_gives_the_bits_of_simulated_ranks():
    found = calls_on(4, fs.make_functional(made()), data, UNITS, run=run_ranks, **HALVES)
    same_step(found, train(4, 2))
    assert all(call.events == call.predicted() for call in found)
