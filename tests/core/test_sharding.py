"""``shard`` and ``gather`` are inverses, share no memory with their inputs, and refuse trees of another plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard._utils import tree
from tests.core.units import mlp, of_module, requiring_grad, same_bits
from tests.pairwise import crossed
from tests.ranks import on_ranks

STRATEGIES = ["full_shard", "shard_grad_op", "no_shard"]
WORLDS = [1, 2, 3, {"replicate": 2, "shard": 2}]
on_every_plan = crossed(strategy=STRATEGIES, world=WORLDS)


@on_every_plan
def test_the_shards_side_by_side_are_the_leaves_and_zeros(world: Any, strategy: str) -> None:
    """tests/hostile/test_trees.py gathers shards of random trees."""
    blocks = [{"w": torch.randn(3, 3), "b": torch.randn(3)} for _ in range(2)]
    params = {"blocks": blocks, "s": torch.randn(()), "e": torch.zeros(0), "i": torch.arange(5)}
    plan = fs.make_plan(params, world, units=["blocks.*"], strategy=strategy)
    everyone = fs.simulate(lambda mesh: (mesh.shape, mesh.shard.rank, fs.shard(params, plan, mesh)), world)
    by_path = dict(zip(*tree.describe(params)[:0:-1], strict=True))
    keys = {unit.name: [buffer.key for buffer in unit.buffers] for unit in plan.unit_list}
    assert all({name: list(own) for name, own in shards.items()} == keys for _, _, shards in everyone)
    for unit in plan.unit_list:
        for buffer in unit.buffers:
            flat = torch.cat([by_path[leaf.path].reshape(-1) for leaf in buffer.leaves])
            for shape, rank, shards in everyone:
                cut = shape["shard"] if unit.sharded else 1
                padded = torch.cat([flat, torch.zeros(buffer.shard_numel * cut - len(flat), dtype=flat.dtype)])
                same_bits(shards[unit.name][buffer.key], padded.chunk(cut)[rank % cut] if len(flat) else flat)


@on_every_plan
@on_ranks()
def test_neither_shares_memory_with_what_it_is_given(mesh: fs.Mesh, world: Any, strategy: str) -> None:
    params = {"w": torch.arange(8.0).view(4, 2), "one": torch.ones(5)}
    before = tree.map(torch.clone, params)
    plan = fs.make_plan(params, mesh, units=["one"], strategy=strategy)
    shards = fs.shard(params, plan, mesh)
    kept = tree.map(torch.clone, shards)
    tree.map(lambda t: t.fill_(-1), fs.gather(shards, plan, mesh))
    same_bits(shards, kept)
    tree.map(lambda t: t.fill_(-1), shards)
    same_bits(params, before)


def test_tied_leaves_stay_one_tensor() -> None:
    w = torch.randn(3)
    params = {"a": w, "b": {"c": w}}
    plan = fs.make_plan(params, 1)
    gathered = fs.gather(fs.shard(params, plan, fs.Mesh()), plan, fs.Mesh())
    assert gathered["a"] is gathered["b"]["c"]
    assert torch.equal(gathered["a"], w)


@on_every_plan
@on_ranks()
def test_gather_is_differentiable(mesh: fs.Mesh, world: Any, strategy: str) -> None:
    params = {"w": torch.arange(5.0)}
    plan = fs.make_plan(params, mesh, strategy=strategy)
    shards = requiring_grad(fs.shard(params, plan, mesh))
    out = fs.gather(shards, plan, mesh)["w"]
    (grad,) = torch.autograd.grad((out**2).sum(), tree.leaves(shards))
    expected = {"w": 2 * params["w"] * mesh.world_size}
    assert torch.equal(grad, tree.leaves(fs.shard(expected, plan, mesh))[0])


W = torch.zeros(4)
PARAMS = {"w": W, "v": torch.zeros(2, 2)}


PLAN, OTHER = fs.make_plan(PARAMS, 1, units=["v"]), fs.make_plan(PARAMS, {"replicate": 2, "shard": 3})


def cut(params: Any, plan: fs.Plan = PLAN) -> Callable[[], Any]:
    return lambda: fs.shard(params, plan, fs.Mesh())


def gathered(shards: Any) -> Callable[[], Any]:
    return lambda: fs.gather(shards, PLAN, fs.Mesh())


RANKS = "a mesh of 2 replicate × 3 shard ranks; found "
UNITS, BUFFER = r"shards must hold the units of the plan, \['', 'v'\]; found ", r"shard 'float32' of unit '\(root\)' must "
NOT_THE_PLANS: dict[str, tuple[Callable[[], Any], str]] = {  # tests/core/test_checksum.py has more
    "a leaf more": (cut({**PARAMS, "u": W}), r"missing: nothing, unexpected: \['u'\]: make the plan from these params"),
    "a leaf of another dtype": (cut({**PARAMS, "w": W.double()}), r"leaf 'w' .* dtype float32, as planned; found \(4,\) a"),
    "another mesh": (cut(PARAMS, OTHER), f"made for {RANKS}.*: make the plan with make_plan"),
    "a unit for another mesh": (
        lambda: fs.unshard(lambda leaves: leaves, OTHER.units[""], fs.Mesh()), f"planned for {RANKS}{{'replicate': 1, 'shard"
    ),
    "shards of other units": (gathered({"": {}, "w": {}}), UNITS + r"\['', 'w'\]: they were made with another plan"),
    "a list": (gathered([1]), UNITS + "list"),
    "other buffers": (gathered({"": {"float64": W}, "v": {}}), r"shard of unit '\(root\)' must hold the buffers \['float"),
    "another size": (gathered({"": {"float32": torch.zeros(2)}, "v": {}}), BUFFER + r"have shape \(4,\), one of 1 sh"),
    "another dtype": (gathered({"": {"float32": W.double()}, "v": {}}), BUFFER + "have dtype float32; found"),
    "another device": (gathered({"": {"float32": W.to("meta")}, "v": {}}), BUFFER + "be on the mesh's device, cpu; found"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_THE_PLANS)
def test_what_is_not_the_plans_is_refused(name: str) -> None:
    call, words = NOT_THE_PLANS[name]
    with pytest.raises(ValueError, match=words):
        call()


def of_rank(rank: int) -> dict[str, Any]:
    return {
        "a": torch.arange(5.0) + 10 * rank,
        "b": [torch.full((2, 3), rank), torch.zeros(0)],
        "c": torch.tensor(-1.0 - rank),
    }


@pytest.mark.nightly(one_in=2)
@crossed(others=["cpu", "meta"], world=[*WORLDS, {"replicate": 2, "shard": 1}], strategy=STRATEGIES)
@on_ranks()
def test_every_rank_takes_the_values_of_src(mesh: fs.Mesh, strategy: str, world: Any, others: str) -> None:
    plan = fs.make_plan(of_rank(0), mesh, units=["b"], strategy=strategy)
    for src in range(mesh.world_size):
        device = "cpu" if mesh.rank == src else others
        mine = tree.map(lambda leaf, device=device: leaf.to(device), of_rank(mesh.rank))
        found, expected = fs.shard(mine, plan, mesh, src=src), fs.shard(of_rank(src), plan, mesh)
        same_bits(found, expected)


def test_offloaded_shards_are_on_the_cpu_whatever_the_device_of_the_mesh() -> None:
    mesh = fs.Mesh(device=torch.device("meta"))  # stands for an accelerator
    plan = fs.make_plan(PARAMS, 1, units=fs.wrap.Units(["v"], {"v": {"offload": True}}))
    shards = fs.shard(PARAMS, plan, mesh)
    assert {name: unit["float32"].device.type for name, unit in shards.items()} == {"": "meta", "v": "cpu"}
    assert fs.gather(shards, plan, mesh)["v"].is_meta


# --- gradients hold None for frozen leaves --------------------------------------------------------


GRID = {"replicate": 2, "shard": 2}
FROZEN_UNITS = ["0", "2"]
FROZEN = {"0.weight", "0.bias", "2.bias"}
net = functools.partial(mlp, 3, 4, 4, 2, frozen=FROZEN)


X = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)


def gradients(mesh: fs.Mesh, strategy: str = "full_shard") -> Any:
    plan, sharded, shards = of_module(mesh, net(), FROZEN_UNITS, strategy=strategy)
    return plan, shards, fs.value_and_grad(lambda s: sharded(s, {}, X).square().mean())(shards)[1]


def whole() -> dict[str, torch.Tensor | None]:
    model = net()
    model(X).square().mean().backward()
    return {name: leaf.grad for name, leaf in model.named_parameters()}


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("world", [1, 2, GRID], ids=str)
@on_ranks()
def test_gather_gives_none_for_frozen_leaves(mesh: fs.Mesh, world: Any, strategy: str) -> None:
    plan, _, grads = gradients(mesh, strategy)
    with fs.record_events() as events:
        gathered = fs.gather(grads, plan, mesh)
    assert not [event for event in events if "frozen" in event.buffer]
    assert {name for name, grad in gathered.items() if grad is None} == FROZEN
    torch.testing.assert_close(dict(gathered), whole())


@pytest.mark.parametrize("options", [{}, {"rank0_only": True}, {"sharded": True}], ids=str)
@on_ranks(GRID)
def test_a_state_dict_of_gradients_leaves_the_names_of_frozen_leaves_out(mesh: fs.Mesh, options: Any) -> None:
    plan, _, grads = gradients(mesh)
    found = fs.to_state_dict(grads, plan, mesh, **options)
    trained = {name: grad for name, grad in whole().items() if grad is not None}
    assert found.keys() == (set() if "rank0_only" in options and mesh.rank else trained.keys())
    for name, value in found.items():
        if isinstance(value, fs.Piece):
            part = slice(value.offset, value.offset + len(value.tensor))
            torch.testing.assert_close(value.tensor, trained[name].flatten()[part])
        else:
            torch.testing.assert_close(value, trained[name])
