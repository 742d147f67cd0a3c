"""Gradients hold None for frozen leaves: gather, shard and state dicts of such trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs

GRID = {"replicate": 2, "shard": 2}
UNITS = ["0", "2"]
FROZEN = {"0.weight", "0.bias", "2.bias"}


def net() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    for name, leaf in made.named_parameters():
        leaf.requires_grad_(name not in FROZEN)
    return made


def gradients(mesh: fs.Mesh, strategy: str = "full_shard") -> Any:
    apply, params, _ = fs.make_functional(net())
    plan = fs.make_plan(params, mesh, units=UNITS, strategy=strategy)
    sharded = fs.fully_shard(apply, plan, mesh)
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)
    shards = fs.shard(params, plan, mesh)
    return plan, shards, fs.value_and_grad(lambda s: sharded(s, {}, x).square().mean())(shards)[1]


def whole() -> dict[str, torch.Tensor | None]:
    model = net()
    model(torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)).square().mean().backward()
    return {name: leaf.grad for name, leaf in model.named_parameters()}


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("world", [1, 2, GRID], ids=str)
def test_gather_gives_none_for_frozen_leaves_and_shard_is_its_inverse(world: Any, strategy: str) -> None:
    def main(mesh: fs.Mesh) -> None:
        plan, _, grads = gradients(mesh, strategy)
        with fs.record_events() as events:
            gathered = fs.gather(grads, plan, mesh)
        assert not [event for event in events if "frozen" in event.buffer]
        assert {name for name, grad in gathered.items() if grad is None} == FROZEN
        for name, wanted in whole().items():
            if wanted is not None:
                torch.testing.assert_close(gathered[name], wanted)
        again: Any = fs.shard(gathered, plan, mesh)
        assert again.keys() == grads.keys()
        for unit, own in grads.items():
            for key, grad in own.items():
                assert (again[unit][key] is None) == (grad is None) == key.endswith("frozen")
                assert grad is None or torch.equal(again[unit][key], grad)

    fs.simulate(main, world)


@pytest.mark.parametrize("options", [{}, {"rank0_only": True}, {"sharded": True}], ids=str)
def test_a_state_dict_of_gradients_leaves_the_names_of_frozen_leaves_out(options: Any) -> None:
    def main(mesh: fs.Mesh) -> None:
        plan, _, grads = gradients(mesh)
        found = fs.to_state_dict(grads, plan, mesh, **options)
        trained = {name for name, grad in whole().items() if grad is not None}
        assert found.keys() == (set() if "rank0_only" in options and mesh.rank else trained)
        for name, value in found.items():
            full = whole()[name]
            assert full is not None
            if isinstance(value, fs.Piece):
                part = slice(value.offset, value.offset + len(value.tensor))
                torch.testing.assert_close(value.tensor, full.flatten()[part])
            else:
                torch.testing.assert_close(value, full)

    fs.simulate(main, GRID)


# --- mistakes -------------------------------------------------------------------------------------


def test_none_for_a_leaf_with_a_gradient_is_an_error() -> None:
    plan, _, grads = gradients(fs.Mesh())
    without = {**grads, "2": {**grads["2"], "float64": None}}
    for use in (fs.gather, fs.to_state_dict):
        with pytest.raises(ValueError, match="shard 'float64' of unit '2' must be a tensor; found NoneType"):
            use(without, plan, fs.Mesh())
    gathered = fs.gather(grads, plan, fs.Mesh())
    with pytest.raises(ValueError, match=r"must be the tree that the plan was made for; missing: \['2.weight'\]"):
        fs.shard({**gathered, "2.weight": None}, plan, fs.Mesh())


def test_leaves_that_are_missing_are_not_none() -> None:
    plan, _, grads = gradients(fs.Mesh())
    gathered = fs.gather(grads, plan, fs.Mesh())
    with pytest.raises(ValueError, match=r"missing: \['0.bias', '0.weight'\], unexpected: nothing"):
        fs.shard({name: leaf for name, leaf in gathered.items() if name != "0.weight"}, plan, fs.Mesh())
    with pytest.raises(
        ValueError, match=r"must be all None or all tensors; found None for '0.*', and a tensor for '0.*': pass"
    ):
        fs.shard({**gathered, "0.weight": torch.zeros(4, 3, dtype=torch.float64)}, plan, fs.Mesh())


def test_with_src_every_leaf_needs_values() -> None:
    def main(mesh: fs.Mesh) -> None:
        plan, _, grads = gradients(mesh)
        gathered = fs.gather(grads, plan, mesh)
        with pytest.raises(ValueError, match=r"missing: .*0\.bias"):
            fs.shard(gathered, plan, mesh, src=0)

    fs.simulate(main, 2)


def test_a_rank_that_has_values_where_others_have_none_is_an_error_on_every_rank() -> None:
    def main(mesh: fs.Mesh) -> None:
        plan, shards, grads = gradients(mesh)
        tree = fs.gather(grads, plan, mesh)
        full = fs.gather(shards, plan, mesh)
        mine = {**tree, **{name: full[name] for name in FROZEN}} if mesh.rank else tree
        with pytest.raises(ValueError, match=r"leaf '0\.bias' of params must have the same values on every rank"):
            fs.shard(mine, plan, mesh)

    fs.simulate(main, 2)


def test_a_gradient_tree_is_no_tree_of_parameters() -> None:
    apply, params, _ = fs.make_functional(net())
    plan = fs.make_plan(params, 1, units=UNITS)
    grads = gradients(fs.Mesh())[2]
    sharded = fs.fully_shard(apply, plan, fs.Mesh())
    with pytest.raises(
        ValueError, match=r"found NoneType: .* None for frozen shards alone; put zeros there to compute with"
    ):
        sharded(grads, {}, torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="the state dict must hold every leaf of the plan; missing"):
        fs.from_state_dict(fs.to_state_dict(grads, plan, fs.Mesh()), plan, fs.Mesh())
