"""The leaves of a tree: which are trainable, and which tensors are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import funcshard as fs


def marked(*, frozen: bool) -> dict[str, torch.Tensor]:
    """Return a parameter from ``make_functional``."""
    return fs.make_functional(nn.ParameterDict({"w": parameter(not frozen)}))[1]


def parameter(requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(torch.ones(3), requires_grad=requires_grad)


def plain(requires_grad: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(3, dtype=dtype, requires_grad=requires_grad)


# name -> (tree, paths of the leaves that are trainable)
TREES: dict[str, tuple[Any, set[str]]] = {
    "a frozen module": (marked(frozen=True), set()),
    "a frozen module beside a trainable one": ({"a": marked(frozen=True), "b": marked(frozen=False)}, {"b.w"}),
    "a frozen module beside plain adapters": ({"base": marked(frozen=True), "a": plain(), "b": plain()}, {"a", "b"}),
    "a frozen module, adapters, one frozen": ({"base": marked(frozen=True), "a": plain(True), "b": plain()}, {"a"}),
    "a module beside plain tensors": ({"base": marked(frozen=False), "a": plain()}, {"base.w", "a"}),
    "plain tensors": ({"a": plain(), "b": plain(dtype=torch.int64), "c": plain(dtype=torch.complex64)}, {"a", "c"}),
    "plain tensors, one of which requires a gradient": ({"a": plain(True), "b": plain()}, {"a"}),
    "frozen nn.Parameters": ({"a": parameter(False), "b": parameter(False)}, set()),
    "nn.Parameters": ({"a": parameter(True), "b": parameter(False)}, {"a"}),
    "copies of a frozen module's params": ({"w": marked(frozen=True)["w"].to(torch.float64)}, {"w"}),
    "a module frozen after make_functional": ({"w": marked(frozen=False)["w"].requires_grad_(False)}, set()),
    "a module no longer frozen after make_functional": ({"w": marked(frozen=True)["w"].requires_grad_()}, {"w"}),
}


@pytest.mark.parametrize(("params", "trainable"), TREES.values(), ids=TREES)
def test_a_leaf_of_a_module_is_trainable_if_it_requires_a_gradient_whatever_the_others_are(params, trainable) -> None:
    plan = fs.make_plan(params, 2)
    found = {leaf.path for unit in plan.unit_list for buffer in unit.buffers if buffer.trainable for leaf in buffer.leaves}
    assert found == trainable


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_leaves_of_a_frozen_module_are_frozen(device) -> None:
    with torch.device(device):
        net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).requires_grad_(False)
    net[1].weight = net[0].weight
    plan = fs.make_plan(fs.make_functional(net)[1], 2)
    assert [(leaf.path, leaf.aliases) for leaf in plan.leaves] == [("0.weight", ("1.weight",))]
    assert [buffer.trainable for unit in plan.unit_list for buffer in unit.buffers] == [False]


class OnlyAName(nn.Parameter):
    """A class that adds nothing to the operations of its tensors."""


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def placeholder() -> torch.Tensor:
    apply, params, _ = fs.make_functional(nn.Linear(1, 3))
    return fs.fully_shard(apply, fs.make_plan(params, fs.Mesh()), fs.Mesh()).outside["bias"]


PLAIN = {
    "placeholder": placeholder,
    "nn.Buffer": lambda: nn.Buffer(torch.ones(3)),
    "fake tensor": fake,
    "a subclass of nn.Parameter": lambda: OnlyAName(torch.ones(3)),
}


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_leaves_that_are_planned(make) -> None:
    assert [leaf.shape for leaf in fs.make_plan({"w": make()}, 2).leaves] == [(3,)]
