"""Gathered leaves are read-only: a write to one raises an error, and a unit returns copies of them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import funcshard as fs
from tests.ranks import run_ranks, run_simulated

WIDTH = 200  # a weight of 160 kB: so large that ranks share its gathered memory


def leaf(module: nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight


class Layer(nn.Module):
    """A layer whose forward treats its weight as ``what`` says."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.eye(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.what = what

    def forward(self, x: torch.Tensor) -> Any:
        return DOES[self.what](self, x)


def clamped(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        leaf(self).clamp_(-0.5, 0.5)
    return x @ leaf(self)


def renormed(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + F.embedding(torch.arange(2), leaf(self), max_norm=0.5)


def written_through_detach(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    leaf(self).detach().mul_(2.0)
    return x @ leaf(self)


def a_part_of_it(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        leaf(self)[0].zero_()
    return x @ leaf(self)


CHANGES = {each.__name__: each for each in (clamped, renormed, written_through_detach, a_part_of_it)}

RETURNS = {
    "itself": lambda self, x: leaf(self),
    "transposed": lambda self, x: leaf(self).t(),
    "a part": lambda self, x: leaf(self)[:3],
    "in a tuple": lambda self, x: (x @ leaf(self), leaf(self)),
    "in a list": lambda self, x: [leaf(self), x @ leaf(self)],
    "in a dict": lambda self, x: {"x": x @ leaf(self), "weight": leaf(self)},
    "deep inside": lambda self, x: (x @ leaf(self), [{"weight": leaf(self)}]),
}

DOES = {**CHANGES, **RETURNS}


def made(mesh: fs.Mesh, what: str, strategy: str) -> tuple[Any, fs.Shards, Any]:
    if mesh.world_size > 1 and type(mesh.shard).__name__ == "TorchGroup":
        mesh = fs.init_mesh(mesh.shape, device="cpu")
    apply, params, buffers = fs.make_functional(
        nn.Sequential(Layer(what), Layer(what) if what in CHANGES else nn.Identity())
    )
    plan = fs.make_plan(params, mesh, units=["*"], strategy=strategy)
    return fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh), buffers


def change(mesh: fs.Mesh, what: str, strategy: str, grad: bool) -> str:
    sharded, shards, buffers = made(mesh, what, strategy)
    x = torch.ones(2, WIDTH)
    try:
        if grad:
            fs.value_and_grad(lambda s: sharded(s, buffers, x).sum())(shards)
        else:
            with torch.no_grad():
                sharded(shards, buffers, x)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("what", CHANGES)
def test_a_leaf_that_forward_modifies_is_named(what, strategy) -> None:
    for message in run_simulated(change, 2, what, strategy, False):
        assert message.startswith("the forward of unit '0' modified a leaf in place, one of buffer 'float32' ")
        assert "('0.bias', '0.weight'); gathered leaves are read-only" in message
        remedy = "modify a copy, keep values that change in a buffer of the module, or change the shards between steps"
        assert remedy in message
    for message in run_simulated(change, 2, what, strategy, True):  # in a graph, torch itself refuses some of the writes
        assert message.startswith("the forward of unit '0' modified a leaf in place, one of buffer 'float32' ")


def change_unnoticed(mesh: fs.Mesh) -> tuple[list[float], list[float]]:
    sharded, shards, buffers = made(mesh, "written_through_detach", "full_shard")
    with torch.inference_mode():
        found = [sharded(shards, buffers, torch.ones(1, WIDTH)).sum().item() for _ in range(3)]
    return found, [local.sum().item() for local in shards["0"].values()]


@pytest.mark.parametrize("run", [run_simulated, run_ranks])
def test_in_inference_mode_each_rank_changes_its_own(run) -> None:
    # twice, through two layers
    assert [found for found, _ in run(change_unnoticed, 2)] == [[4.0 * WIDTH] * 3] * 2


def give_out(mesh: fs.Mesh, what: str, strategy: str, grad: bool) -> tuple[bool, bool, bool]:
    sharded, shards, buffers = made(mesh, what, strategy)
    shards = {unit: {key: local.requires_grad_(grad) for key, local in held.items()} for unit, held in shards.items()}
    x = torch.ones(2, WIDTH)
    with torch.set_grad_enabled(grad):
        first = tensors(sharded(shards, buffers, x))
        before = [each.detach().clone() for each in first]
        if mesh.rank == 0:
            with torch.no_grad():
                for each in first:
                    each.zero_()
        fs.psum(torch.ones(1), mesh)  # rank 1 compares after rank 0 has written
        again = tensors(sharded(shards, buffers, x))
    same = mesh.rank == 0 or all(torch.equal(now, then) for now, then in zip(first, before, strict=True))
    return same, all(torch.equal(now, then) for now, then in zip(again, before, strict=True)), grad == first[0].requires_grad


def give_out_each(mesh: fs.Mesh, strategy: str, grad: bool) -> dict[str, tuple[bool, bool, bool]]:
    return {what: give_out(mesh, what, strategy, grad) for what in RETURNS}


def tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [each for value in (result.values() if isinstance(result, dict) else result) for each in tensors(value)]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only there do ranks share memory")
@pytest.mark.parametrize("grad", [True, False], ids=["with a graph", "without"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_a_returned_leaf_may_be_written_to(strategy, grad) -> None:
    for found in run_ranks(give_out_each, 2, strategy, grad):
        assert found == dict.fromkeys(RETURNS, (True, True, True))


def gradient_of_what_is_given_out(mesh: fs.Mesh) -> list[float]:
    sharded, shards, buffers = made(mesh, "in a tuple", "full_shard")
    x = torch.ones(2, WIDTH)
    loss = lambda s: sum(out.square().sum() for out in sharded(s, buffers, x))  # noqa: E731
    _, grads = fs.value_and_grad(loss)(shards)
    return [local.double().sum().item() for local in grads["0"].values()]


def test_what_is_given_out_has_its_gradient() -> None:
    # The gradient of ||x w||² + ||w||², with w the identity and x two rows of ones: 2 xᵀx + 2 w.
    total = 2 * 2 * WIDTH * WIDTH + 2 * WIDTH
    for run in (run_simulated, run_ranks):
        assert sum(sum(each) for each in run(gradient_of_what_is_given_out, 2)) == total


def hold_the_model(mesh: fs.Mesh, strategy: str) -> tuple[int, int]:
    mesh = fs.init_mesh(mesh.shape, device="cpu")
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    apply, params, buffers = fs.make_functional(nn.Sequential(*layers))
    plan = fs.make_plan(params, mesh, units=["*"], strategy=strategy)
    sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
    out = sharded(
        {u: {k: s.requires_grad_() for k, s in unit.items()} for u, unit in shards.items()}, buffers, torch.ones(1, WIDTH)
    )
    fs.psum(torch.ones(1), mesh)
    pool = mesh.shard.shm.blocks.pool
    held = pool.made - len(pool._free)
    out.sum().backward()
    return held, pool.made


@pytest.mark.skipif(sys.platform != "linux", reason="only there do ranks share memory")
def test_a_model_that_stays_gathered_is_in_memory_once() -> None:
    (first, _), (second, _), (third, _) = run_ranks(hold_the_model, 3, "shard_grad_op")
    assert first in (6, 7)  # one block for each unit, and one for tiny buffers
    assert max(second, third) <= 2


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> list[torch.Tensor]:
        cache.append(self.linear(x))
        return cache


def test_a_container_without_leaves_stays_the_one_it_is() -> None:
    def main(mesh: fs.Mesh) -> bool:
        apply, params, buffers = fs.make_functional(Appends())
        plan = fs.make_plan(params, mesh, units=[])
        cache: list[torch.Tensor] = []
        sharded = fs.fully_shard(apply, plan, mesh)
        return sharded(fs.shard(params, plan, mesh), buffers, torch.ones(1, 4), cache) is cache

    assert run_simulated(main, 2) == [True] * 2
