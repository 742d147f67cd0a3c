"""Schedules of units that forward calls several times, as a model does whose layers share their parameters."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from funcshard._utils import tree
from tests.core.units import of_module, recorded, requiring_grad, same_bits
from tests.module.law import Runs
from tests.pairwise import crossed
from tests.ranks import on_ranks, run_ranks
from tests.storages import Alive, Log, LoggedBlock

WIDTH, MUCH = 6, 1 << 20
AGAIN, BETWEEN = (0, 0, 0, 0), (0, 1, 0, 2, 0, 3, 0)  # a layer again and again; one between the others


def in_order(net, x, order, *, again=False, last=False):
    x = x if last else x * net.scale
    for number in order:
        block = net.blocks[number]
        x = checkpoint(block, x, use_reentrant=False) if again else block(x)
    return (x * net.scale if last else x).square().mean()


def made(order, log=None, *, run=in_order, **how):
    """Return a function that calls blocks in some order, after a scale of its own, or before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        blocks = nn.ModuleList(LoggedBlock(WIDTH, Log() if log is None else log) for _ in range(max(order) + 1))
        run, scale = functools.partial(run, order=order, **how), nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        return fs.make_functional(Runs(run, blocks=blocks, scale=scale))


def names(order):
    return [f"blocks.{number}" for number in order]


def on(mesh, functional, strategy="shard_grad_op", *, order=None, units=("blocks.*",), bucket_bytes=0, **how):
    """Return ``(sharded, shards)``, under the schedule of an order if one is given."""
    schedule = None if order is None else {"order": names(order)}
    options = {"strategy": strategy, "bucket_bytes": bucket_bytes}
    return of_module(mesh, functional, units, schedule=schedule, how=how, **options)[1:]


def step_of(sharded, shards, mesh, width=WIDTH):
    x = torch.linspace(-1, 1, 2 * width).view(2, width) * (1 + mesh.rank)
    (loss, grads), events = recorded(fs.value_and_grad(lambda s: sharded(s, {}, x)), shards)
    return (loss, fs.gather(grads, sharded.plan, mesh)), events


WAYS = {  # options of the model, of fully_shard, of predict_events
    "remat": ({}, {"remat": ["blocks.0"]}, ["blocks.0"]),
    "checkpointed": ({"again": True}, {}, None),
    # Backward of the first use needs no parameter, but what computes it again gathers them.
    "remat without a gradient for the input": ({"last": True}, {"remat": ["blocks.0"]}, ["blocks.0"]),
}


@pytest.mark.nightly(one_in=3)
@crossed(way=list(WAYS), order=[AGAIN, BETWEEN, (0, 0), (0, 1, 0)], strategy=["full_shard", "shard_grad_op"])
@on_ranks(2)
def test_what_is_computed_again_is_predicted(mesh, strategy, order, way):
    model, sharding, recomputed = WAYS[way]
    recomputed = sorted(set(names(order))) if recomputed is None else recomputed
    functional, plain = made(order, **model), made(order, **{**model, "again": False})[0]
    for size in (0, MUCH):
        sharded, shards = on(mesh, functional, strategy, bucket_bytes=size, **sharding)
        results = [step_of(f, shards, mesh)[0] for f in (fs.fully_shard(plain, sharded.plan, mesh), sharded)]
        result, events = step_of(sharded, shards, mesh)
        units = [unit.name for unit in sharded.plan.unit_list if set(recomputed).intersection(unit.paths)]
        assert events == fs.predict_events(sharded.plan, sharded.schedule, recomputed=units)
        same_bits([*results, result], [result] * 3)


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "given"])
@pytest.mark.parametrize("grad", [True, False], ids=["with gradients", "without"])
@on_ranks(2)
def test_a_unit_that_stays_gathered_is_gathered_once_a_call_and_is_in_memory_once(mesh, grad, learned):
    once = Counter(["", *names(range(4))])
    twice = once + Counter(names([0]))  # nobody knows of it until it comes the second time
    log = Log()
    sharded, shards = on(mesh, made(BETWEEN, log), order=None if learned else BETWEEN)
    requiring_grad(shards, grad)
    for gathers, copies in ((twice, 5) if learned else (once, 4), (once, 4)):
        log.clear()
        with fs.record_events() as events, torch.set_grad_enabled(grad):
            loss = sharded(shards, {}, torch.ones(2, WIDTH))
        alive = {ref.cdata for ref in log if not ref.expired()}
        assert Counter(event.unit for event in events if event.kind == "all_gather") == gathers
        assert len(alive) == copies * grad
        del loss
        assert log.alive() == 0


@pytest.mark.parametrize("grad", [True, False], ids=["with gradients", "without"])
@on_ranks(2)
def test_a_unit_is_let_go_of_after_its_last_time(mesh, grad):
    def watching(net, x, order):
        log, seen = net.blocks[0].log, []
        for number in order:
            x = net.blocks[number](x.detach()) * net.scale  # so that autograd needs no weight
            seen.append(log.alive())
            log.clear()
        return x, tuple(seen)

    sharded, shards = on(mesh, made((0, 1, 0, 2), Log(), run=watching), order=(0, 1, 0, 2))
    assert sharded(requiring_grad(shards, grad), {}, torch.ones(2, WIDTH))[1] == (1, 0, 0, 0)


@on_ranks(2)
def test_uses_with_and_without_gradients_share_what_is_gathered_and_no_graph(mesh):
    def with_and_without(net, x, order):
        x = x * net.scale
        for number, grad in zip(order, (False, True, False, True), strict=True):
            with torch.set_grad_enabled(grad):
                x = net.blocks[number](x)
        return x.square().mean()

    (apply, params, _), results = made(AGAIN, run=with_and_without), []
    for strategy in ("full_shard", "shard_grad_op"):
        sharded, shards = on(mesh, (apply, params, {}), strategy)
        results += [step_of(sharded, shards, mesh)[0] for _ in range(2)]
    same_bits(results, results[:1] * len(results))
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH) * (1 + mesh.rank)
    expected = torch.func.grad(lambda p: apply(p, {}, x))(params)
    torch.testing.assert_close(results[0][1], tree.map(lambda grad: fs.pmean(grad, mesh), expected))


def doubling(block, x):
    """Write to the weight, but in inference mode alone."""
    y = torch.tanh(x @ block.weight)
    if torch.is_inference_mode_enabled():
        block.weight.mul_(2)
    return y


def in_modes(mesh, modes, cast, shared_memory=None):
    """Use one block in inference mode, or outside, as ``modes`` say."""

    def forward(net, x):
        x, total = x * net.scale, 0.0
        for inference in modes:
            with torch.inference_mode(inference):
                y = net.block(x.detach() if inference else x)
            total, x = (total + y.sum().item(), x) if inference else (total, y)
        return x.square().mean() + total

    if shared_memory is not None:
        mesh = fs.init_mesh(mesh.shape, device="cpu", shared_memory=shared_memory)
    block = Runs(doubling, weight=nn.Parameter(torch.linspace(-1, 1, 200 * 200).view(200, 200)))
    functional = fs.make_functional(Runs(forward, block=block, scale=nn.Parameter(torch.linspace(0.5, 1.5, 200))))
    results, cast = [], (lambda unit, buffer: COPYING) if cast else None
    for strategy in ("full_shard", "shard_grad_op"):
        sharded, shards = on(mesh, functional, strategy, units=["block"], cast=cast)
        results += [step_of(sharded, shards, mesh, 200)[0] for _ in range(3)]
    same_bits(results, results[:1] * len(results))
    return results[0]


COPYING = fs.Cast(lambda shard: shard.clone(), lambda rows: rows.flatten())
MODES = {"between": (False, True, False, False), "around": (True, True, False, True, False, True)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modes", "cast", "shared_memory"), [("between", False, True), ("around", False, False), ("around", True, True)]
)
def test_a_use_in_inference_mode_has_memory_of_its_own_to_write_to(modes, cast, shared_memory):
    expected = fs.simulate(lambda mesh: in_modes(mesh, MODES[modes], cast), 2)
    same_bits(run_ranks(in_modes, 2, MODES[modes], cast, shared_memory), expected)


def test_of_a_cast_unit_that_stays_only_the_result_is_kept():
    widened = fs.Cast(lambda shard: shard.double(), lambda rows: rows.flatten().float())

    def watching(net, x, order):
        found = []
        for number in order:
            x = net.blocks[number](x)
            found.append({size: count for size, count in alive.now().items() if size >= 4 * WIDTH * (WIDTH + 1)})
        return x, found

    sharded, shards = on(fs.Mesh(), made((0, 1, 0), run=watching), order=(0, 1, 0), cast=lambda unit, buffer: widened)
    size = 4 * sharded.plan.units["blocks.0"].buffers[0].padded_numel
    with torch.no_grad(), Alive(lambda nbytes: nbytes in (size, 2 * size)) as alive:
        _, found = sharded(shards, {}, torch.ones(1, WIDTH))
    # beside what is gathered ahead, which has travelled
    assert found == [{size: 1, 2 * size: 1}, {size: 1}, {}]
