"""Ranks that keep other outputs than each other in memory issue the same collectives."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from funcshard.core.buffer_comm import AllGatherHandle
from tests.core.units import of_module, recorded, requiring_grad, same_bits
from tests.module.law import Runs
from tests.pairwise import crossed
from tests.ranks import on_ranks, run_simulated

WIDTH = 6


def block():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def all_heads(net, x):
    x = net.b(net.a(x))
    aux = net.aux(x)
    more = net.more(aux)
    return net.c(x), aux, more


def heads():
    """Blocks, and two auxiliary heads between them; the result holds all outputs."""
    return Runs(all_heads, a=block(), b=block(), aux=block(), more=block(), c=block())


def shifted(net, x):
    x, aux = net.b(net.a(x))
    return net.c(x), aux


def shifts():
    """Blocks around a unit that saves its weight for an output, and has another output that saves nothing."""
    weight, bias = nn.Parameter(torch.eye(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
    both = Runs(lambda unit, x: (x + unit.bias, x @ unit.weight), weight=weight, bias=bias)
    return Runs(shifted, a=block(), b=both, c=block())


UNITS = {heads: ["a", "b", "aux", "more", "c"], shifts: ["a", "b", "c"]}
ROWS = {
    "default": (heads, {}, {}),
    "two ahead": (heads, {}, {"limit": 2}),
    "after gradients": (heads, {}, {"backward_prefetch": "post"}),
    "a bucket": (heads, {"bucket_bytes": 1 << 20}, {}),
    "slices": (heads, {"reshard_after_forward": 2}, {}),
    "a part of a unit": (shifts, {}, {}),
}


def kept(mesh: fs.Mesh, row: str, frozen: bool, keeps: str) -> Any:
    """Return losses, gradients and events of steps in which rank 0 alone keeps outputs."""
    model, options, scheduled = ROWS[row]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = model()
    for name, param in net.named_parameters():
        param.requires_grad_(not frozen or not name.startswith(("aux", "more", "b")))
    plan, sharded, shards = of_module(mesh, net, UNITS[model], schedule=scheduled or None, **options)
    log = []

    def loss_fn(shards, x):
        out, *aux = sharded(shards, {}, x)
        if mesh.rank == 0 or keeps == "on all ranks":
            log.append([aux, log] if keeps == "in a cycle" else aux)
        return out.square().sum()

    found, events = [], []
    for _ in range(3):
        (loss, grads), step = recorded(fs.value_and_grad(loss_fn), shards, torch.ones(2, WIDTH) * (1 + mesh.rank))
        found.append((loss, fs.gather(grads, plan, mesh)))
        events.append(step)
        if keeps == "in a cycle":
            log = []
    return found, events


@pytest.mark.nightly(one_in=3)
@pytest.mark.usefixtures("without_garbage_collection")
@crossed(keeps=["on rank 0", "in a cycle"], frozen={"trainable": False, "frozen": True}, row=list(ROWS))
def test_a_rank_that_keeps_an_output_which_the_loss_does_not_use_gathers_what_the_others_gather(row, frozen, keeps):
    ranks = 4 if row == "slices" else 2
    alike = run_simulated(kept, ranks, row, frozen, "on all ranks")
    found = run_simulated(kept, ranks, row, frozen, keeps)
    assert [events for _, events in found] == [events for _, events in alike]
    same_bits([steps for steps, _ in found], [steps for steps, _ in alike])


@pytest.mark.parametrize("keeps", ["on all ranks", "on rank 0"])
def test_a_unit_of_which_the_loss_uses_no_output_is_not_gathered_in_backward(keeps):
    for _, steps in run_simulated(kept, 2, "default", False, keeps):
        for events in steps:
            units = [event.unit for event in events if event.kind == "all_gather"]
            assert units == [*UNITS[heads], "c", "b", "a"]


def noted(net, x, note):
    """Run blocks; backward calls ``note`` when it comes to the output of each."""
    for each in net.blocks:
        x = each(x)
        x.register_hook(note)
    return x


@pytest.mark.parametrize("by", ["inputs", "shards", "both"])
@on_ranks(2)
def test_a_backward_by_inputs_or_shards_gathers_ahead(mesh, by):
    _, sharded, shards = of_module(mesh, Runs(noted, blocks=nn.ModuleList(block() for _ in range(4))), ["blocks.*"])
    x, leaves, gathered = torch.ones(2, WIDTH, requires_grad=True), requiring_grad(shards), []

    def note(_):
        gathered.append(sum(event.kind == "all_gather" for event in events))

    loss = sharded(leaves, {}, x, note).square().sum()
    with fs.record_events() as events:
        torch.autograd.grad(loss, {"inputs": [x], "shards": tree.leaves(leaves), "both": [x, *tree.leaves(leaves)]}[by])
    assert gathered == [0, 2, 3, 4]


@on_ranks(2)
def test_what_backward_gathered_in_vain_is_dropped_when_it_ends(mesh):
    net, outputs = heads(), []
    net.aux.requires_grad_(False)
    _, sharded, shards = of_module(mesh, net, UNITS[heads])

    def loss_fn(shards, x):
        outputs.append(sharded(shards, {}, x))
        return outputs[-1][0].square().sum()

    _, events = recorded(fs.value_and_grad(loss_fn), shards, torch.ones(2, WIDTH))
    held = [each for each in gc.get_objects() if issubclass(type(each), AllGatherHandle) and each.comm.mesh is mesh]
    assert (sum(event.unit == "aux" for event in events), held, len(outputs)) == (2, [], 1)
