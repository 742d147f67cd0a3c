"""Gradients hold None for frozen leaves: gather and state dicts of such trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.core.units import of_module
from tests.ranks import on_ranks

GRID = {"replicate": 2, "shard": 2}
UNITS = ["0", "2"]
FROZEN = {"0.weight", "0.bias", "2.bias"}


def net() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    for name, leaf in made.named_parameters():
        leaf.requires_grad_(name not in FROZEN)
    return made


X = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)


def gradients(mesh: fs.Mesh, strategy: str = "full_shard") -> Any:
    plan, sharded, shards = of_module(mesh, net(), UNITS, strategy=strategy)
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
