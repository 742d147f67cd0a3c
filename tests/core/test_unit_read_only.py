"""Gathered leaves are read-only: a write to one raises an error, and a unit returns copies of them."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import funcshard as fs
from funcshard._utils import tree
from tests.core.units import by_hand, of_module, requiring_grad
from tests.module.law import Runs
from tests.ranks import on_ranks, run_ranks

WIDTH = 200  # a weight of 160 kB: so large that ranks share its gathered memory


CHANGES: dict[str, Any] = {  # functions of a weight
    "clamped": torch.no_grad()(lambda w: w.clamp_(-0.5, 0.5)),
    "renormed": lambda w: F.embedding(torch.arange(2), w, max_norm=0.5),
    "written through detach": lambda w: w.detach().mul_(2.0),
    "a part of it": torch.no_grad()(lambda w: w[0].zero_()),
}
THROUGH_DATA: dict[str, Any] = {  # no version of the weight counts these
    "data written to": lambda w: w.data.mul_(2.0),
    "a part of data": lambda w: w.data[0].sub_(1.0),
    "other data": lambda w: setattr(w, "data", 2.0 * w.data),
    "data of another shape": lambda w: setattr(w, "data", torch.ones(WIDTH, 1)),
}
RETURNS: dict[str, Any] = {  # results for a weight and an input
    "itself": lambda w, x: w,
    "a part": lambda w, x: w[:3],
    "in a tuple": lambda w, x: (x @ w, w),
    "deep inside": lambda w, x: (x @ w, [{"weight": w}]),
}


def treat(layer: Any, x: torch.Tensor, what: str) -> Any:
    if what in RETURNS:
        return RETURNS[what](layer.weight, x)
    {**CHANGES, **THROUGH_DATA}[what](layer.weight)
    return x @ layer.weight


def made(mesh: fs.Mesh, what: str, strategy: str = "full_shard") -> Any:
    if mesh.world_size > 1 and type(mesh.shard).__name__ == "TorchGroup":
        mesh = fs.init_mesh(mesh.shape, device="cpu")
    run, leaves = functools.partial(treat, what=what), {"weight": torch.eye(WIDTH), "bias": torch.zeros(WIDTH)}
    number = 1 if what in RETURNS else 2
    layers = [Runs(run, **{name: nn.Parameter(leaf) for name, leaf in leaves.items()}) for _ in range(number)]
    _, sharded, shards = of_module(mesh, nn.Sequential(*layers), ["*"], strategy=strategy)
    return sharded, shards


@pytest.mark.parametrize("what", CHANGES)
@on_ranks(2)
def test_a_leaf_that_forward_modifies_is_named(mesh: fs.Mesh, what) -> None:
    words = (
        r"^the forward of unit '0' modified a leaf in place, one of buffer 'float32' .*\('0.bias', '0.weight'\); gathered "
        "leaves are read-only.*modify a copy, keep values that change in a buffer of the module, or change the shards"
    )
    (sharded, shards), x = made(mesh, what), torch.ones(2, WIDTH)
    with torch.no_grad(), pytest.raises(RuntimeError, match=words):
        sharded(shards, {}, x)
    with pytest.raises(RuntimeError, match=words.partition(" .*")[0]):  # in a graph, torch itself refuses some writes
        fs.value_and_grad(lambda s: sharded(s, {}, x).sum())(shards)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("change", THROUGH_DATA)
@on_ranks(2)
def test_a_leaf_that_forward_modifies_through_data_is_named(mesh: fs.Mesh, strategy, change) -> None:
    (sharded, shards), x = made(mesh, change, strategy), torch.ones(2, WIDTH)
    shards = tree.map(torch.clone, shards)
    words = r"^the forward of unit '0' wrote to '0.weight' through .data; gathered leaves are read-only"
    with torch.no_grad(), pytest.raises(RuntimeError, match=words):
        sharded(shards, {}, x)
    with pytest.raises(RuntimeError, match=words):
        fs.value_and_grad(lambda s: sharded(s, {}, x).sum())(shards)


def test_a_forward_is_compared_until_it_leaves_its_leaves_alone_and_then_no_more() -> None:
    writes = [False, True]
    _, f, shards = by_hand(fs.Mesh(), {"w": torch.ones(3)}, lambda leaves: writes.pop() and leaves["w"].data.zero_())
    with pytest.raises(RuntimeError, match=r"wrote to 'w' through .data"):
        f(shards[""])
    assert f.first_look.pending
    f(shards[""])
    assert not f.first_look.pending


@on_ranks(2)
def test_a_write_that_torch_itself_refuses_is_named_too(mesh: fs.Mesh) -> None:
    _, f, shards = by_hand(mesh, {"w": torch.ones(3)}, lambda leaves: leaves["w"].mul_(2.0).sum())
    words = r"the forward of unit '\(root\)' modified a leaf in place; gathered leaves are read-only"
    with pytest.raises(RuntimeError, match=words):
        f(requiring_grad(shards[""]))


def give_out_each(mesh: fs.Mesh, strategy: str, grad: bool) -> dict[str, tuple[bool, ...]]:
    return {what: give_out(mesh, what, strategy, grad) for what in RETURNS}


def give_out(mesh: fs.Mesh, what: str, strategy: str, grad: bool) -> tuple[bool, ...]:
    (sharded, shards), x = made(mesh, what, strategy), torch.ones(2, WIDTH)
    shards = requiring_grad(shards, grad)
    with torch.set_grad_enabled(grad):
        first = tree.leaves(sharded(shards, {}, x))
        before = [each.detach().clone() for each in first]
        if mesh.rank == 0:
            for each in first:
                each.detach().zero_()
        fs.psum(torch.ones(1), mesh)  # rank 1 compares after rank 0 has written
        again = tree.leaves(sharded(shards, {}, x))
    same = mesh.rank == 0 or all(map(torch.equal, first, before))
    return same, all(map(torch.equal, again, before)), grad == first[0].requires_grad


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only there do ranks share memory")
@pytest.mark.parametrize(("strategy", "grad"), [("full_shard", True), ("shard_grad_op", False)])
def test_a_returned_leaf_may_be_written_to(strategy, grad) -> None:
    for found in run_ranks(give_out_each, 2, strategy, grad):
        assert found == dict.fromkeys(RETURNS, (True, True, True))


def hold_the_model(mesh: fs.Mesh) -> int:
    mesh = fs.init_mesh(mesh.shape, device="cpu")
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    _, sharded, shards = of_module(mesh, nn.Sequential(*layers), ["*"], strategy="shard_grad_op")
    out = sharded(requiring_grad(shards), {}, torch.ones(1, WIDTH))
    fs.psum(torch.ones(1), mesh)
    pool = mesh.shard.shm.blocks
    held = pool.made - len(pool._free)
    out.sum().backward()
    return held


@pytest.mark.skipif(sys.platform != "linux", reason="only there do ranks share memory")
def test_a_model_that_stays_gathered_is_in_memory_once() -> None:
    first, second, third = run_ranks(hold_the_model, 3)
    assert first in (6, 7)  # one block for each unit, and one for tiny buffers
    assert max(second, third) <= 2
