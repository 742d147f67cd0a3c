"""A forward written by hand starts gathers early: the same bits, the predicted order, one copy for several uses."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from funcshard.testing import delayed
from tests.core.units import each_by_hand, recorded, same_bits
from tests.ranks import on_ranks, run_ranks, run_simulated
from tests.storages import Log

WIDTH, BLOCKS = 4, 3
PARAMS = {"blocks": [{"w": torch.eye(WIDTH) + 0.1 * number, "b": torch.ones(WIDTH)} for number in range(BLOCKS)]}


def block(leaves, x):
    return torch.tanh(x @ leaves["w"] + leaves["b"])


def functions(mesh, freed, apply=block):
    how, strategy = (fs.reshard, "full_shard") if freed else (lambda f: f, "shard_grad_op")
    names = [f"blocks.{number}" for number in range(BLOCKS)]
    return each_by_hand(mesh, PARAMS, dict.fromkeys(names, apply), how=how, strategy=strategy)


def batch_of(mesh):
    return torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).mul(mesh.rank + 1).requires_grad_()


def run_by_hand(fns, shards, x, ahead):
    """Run the blocks in order; ``ahead`` gathers are started before each one computes, 0 for none."""
    names, started = list(fns), {}
    for number, name in enumerate(names):
        for later in names[number : number + ahead + 1] if ahead else ():
            if later not in started:
                started[later] = fns[later].start(shards[later])
        x = fns[name](started[name] if ahead else shards[name], x)
        started[name] = None
    return x.square().mean()


def step(mesh, freed, ahead, seen=None):
    """Return plan, results and events; ``seen`` gets the number of gathers started as each block computes."""

    def apply(leaves, x):
        if seen is not None:
            seen.append(len(events))
        return block(leaves, x)

    plan, fns, shards = functions(mesh, freed, apply)
    with fs.record_events() as events:
        loss, grads = fs.value_and_grad(lambda s, x: run_by_hand(fns, s, x, ahead))(shards, batch_of(mesh))
    return plan, (loss, fs.gather(grads, plan, mesh)), tuple(events)


@pytest.mark.parametrize(("freed", "ahead"), [(True, 1), (True, 2), (False, 2)])
@on_ranks(2)
def test_gathers_started_ahead_come_in_the_predicted_order_and_change_no_bit(mesh, freed, ahead):
    _, plain, on_demand = step(mesh, freed, 0)
    plan, found, events = step(delayed(mesh, "all_gather", 0.002), freed, ahead, seen := [])  # NaN until it is waited for
    schedule = fs.make_schedule(plan, limit=ahead, backward_prefetch=None)
    assert events == fs.predict_events(plan, schedule)
    assert events == on_demand  # early, and in the same order
    assert seen == [min(number + 1 + ahead, BLOCKS) for number in range(BLOCKS)]
    same_bits(found, plain)


@pytest.mark.usefixtures("without_garbage_collection")
@on_ranks(2)
def test_several_calls_share_one_handle_of_unshard_and_one_copy(mesh):
    log, results = Log(), []

    def apply(leaves, x):
        log(leaves["w"])
        return block(leaves, x)

    plan, fns, shards = functions(mesh, False, apply)
    f, x = fns["blocks.1"], batch_of(mesh)

    def twice(shards, started):
        shard = f.start(shards["blocks.1"]) if started else shards["blocks.1"]
        return (f(shard, x) * f(shard, -x)).sum()

    for started, gathers in ((True, 1), (False, 2)):
        (loss, grads), events = recorded(fs.value_and_grad(twice), shards, started)
        assert sum(event.kind == "all_gather" for event in events) == gathers
        results.append((loss, fs.gather(grads, plan, mesh)))
    same_bits(*results)
    assert log.alive() == 0


@pytest.mark.parametrize("freed", [True, False], ids=["reshard", "unshard"])
@on_ranks(2)
def test_a_checkpoint_around_a_call_and_torch_func_take_a_handle(mesh, freed):
    plan, fns, shards = functions(mesh, freed)
    x = batch_of(mesh)

    def loss_fn(shards, around, started):
        f, shard = fns["blocks.1"], shards["blocks.1"]
        shard = f.start(shard) if started else shard
        return (checkpoint(f, shard, x, use_reentrant=False) if around else f(shard, x)).square().mean()

    plain = fs.gather(fs.value_and_grad(loss_fn)(shards, False, False)[1], plan, mesh)
    again = fs.gather(fs.value_and_grad(loss_fn)(shards, True, True)[1], plan, mesh)
    same_bits(again, plain)
    added = fs.gather(torch.func.grad(loss_fn)(shards, False, True), plan, mesh)
    torch.testing.assert_close(added["blocks"][1]["w"], plain["blocks"][1]["w"] * mesh.world_size)


def unused_then_step(mesh):
    _, fns, shards = functions(mesh, True)
    fns["blocks.0"].start(shards["blocks.0"]).wait()
    fns["blocks.1"].start(shards["blocks.1"])  # and one that nothing waits for
    return step(mesh, True, 1)[1], step(mesh, True, 0)[1]


@pytest.mark.parametrize("run", [run_simulated, run_ranks])
def test_a_handle_that_is_not_used_leaves_nothing_that_later_gathers_wait_for(run):
    for found, expected in run(unused_then_step, 2):
        same_bits(found, expected)


def loss_of(run, handle, x):
    return lambda shards: run["blocks.1"](shards["blocks.1"], run["blocks.0"](handle, x)).sum()


MISTAKES = {  # programs of the functions, the shards, a handle of block 0 and an input
    "of another unit": (
        lambda run, shards, handle, x: run["blocks.1"](handle, x),
        ValueError, r"handle of unit 'blocks\.0' was passed to a function of unit 'blocks\.1'; pass it",
    ),
    "used again": (
        lambda run, shards, handle, x: run["blocks.0"](handle, run["blocks.0"](handle, x)),
        ValueError, r"handle of unit 'blocks\.0' was used before, .*; call start for each call, or use",
    ),
    "a changed shard": (
        lambda run, shards, handle, x: shards["blocks.0"]["float32"].mul_(2) is run["blocks.0"](handle, x),
        RuntimeError, r"a shard of unit 'blocks\.0' was modified in place after its gather had started",
    ),
    "started outside": (
        lambda run, shards, handle, x: fs.value_and_grad(loss_of(run, handle, x))(shards),
        ValueError, r"started outside of this call of value_and_grad, .*; call start inside loss_fn",
    ),
    "of all shards": (lambda run, shards, handle, x: run["blocks.0"].start(shards), ValueError, r"blocks\.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
@on_ranks(2)
def test_what_a_handle_cannot_do_is_refused(mesh, name):
    (program, error, words), (_, run, shards) = MISTAKES[name], functions(mesh, True)
    with pytest.raises(error, match=words):
        program(run, shards, run["blocks.0"].start(shards["blocks.0"]), batch_of(mesh))
