"""Buffers of a module on meta are computed, and parameters that a file lacks begin as in the module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard.module import init_missing
from tests.core.units import of_module
from tests.module.test_init import on_meta
from tests.ranks import on_ranks


class Rotary(nn.Module):
    """A module with a computed table, and an integer one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.register_buffer("positions", torch.empty(3, dtype=torch.int64), persistent=False)
        self.register_buffer("absent", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table = torch.arange(4.0, device=self.table.device)  # assigned
        self.positions.copy_(torch.arange(3))  # in place


class Shared(nn.Module):
    """Two modules that are one, and a module whose parent resets it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Rotary()
        self.second = self.first
        self.norm = nn.BatchNorm1d(2)
        self.tail = nn.Linear(2, 2)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 3.0)
        if isinstance(module, Shared):
            nn.init.constant_(module.tail.bias, 7.0)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "of a module's own": Rotary,
    "of a module with two parents": Shared,
    "statistics": lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)),
    "none": lambda: nn.Linear(2, 3),
}


@pytest.mark.parametrize("name", MODULES)
def test_buffers_are_those_of_the_real_module(name: str) -> None:
    meant = dict(MODULES[name]().named_buffers())
    module = on_meta(MODULES[name])
    found = fs.init_buffers(module, fs.Mesh())
    assert list(found) == list(meant)
    assert all(torch.equal(found[key], value) and found[key].dtype == value.dtype for key, value in meant.items())
    assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    _, _, blank = fs.make_functional(module)
    assert list(blank) == list(found)


def test_a_reset_of_ones_own_is_called_with_children_first() -> None:
    seen = []

    def reset(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        if isinstance(module, Rotary):
            module.table.fill_(1.0)
            module.positions.fill_(1)

    module = on_meta(lambda: nn.Sequential(nn.Sequential(Rotary()), nn.Linear(2, 2)))
    assert fs.init_buffers(module, fs.Mesh(), reset=reset)["0.0.table"].tolist() == [1.0] * 4
    assert seen == ["Rotary", "Sequential", "Sequential"]


@on_ranks(2)
def test_missing_parameters_begin_as_the_module_says(mesh: fs.Mesh) -> None:
    module = on_meta(Shared)
    _, params, _ = fs.make_functional(module)
    plan = fs.make_plan(params, mesh, units=["tail"])
    shards = fs.shard({path: torch.full(leaf.shape, -1.0) for path, leaf in params.items()}, plan, mesh)
    init_missing(module, plan, mesh, shards, ["tail.weight", "tail.bias"])
    assert {path: leaf.unique().tolist() for path, leaf in fs.gather(shards, plan, mesh).items()} == {
        "norm.weight": [-1.0], "norm.bias": [-1.0], "tail.weight": [3.0], "tail.bias": [7.0]
    }  # fmt: skip


def test_buffers_that_were_left_on_meta_are_told() -> None:
    module, mesh, x = on_meta(MODULES["statistics"]), fs.Mesh(), torch.ones(4, 2)
    apply, params, buffers = fs.make_functional(module, mutable=True)
    ones = {path: torch.ones(leaf.shape) for path, leaf in params.items()}
    _, sharded, shards = of_module(mesh, (apply, ones, buffers))
    words = r"found '1.running_mean' on the meta device: compute the buffers with init_buffers"
    with pytest.raises(ValueError, match=words):
        sharded(shards, buffers, x)
    assert torch.isfinite(sharded(shards, fs.init_buffers(module, mesh), x)[0]).all()
