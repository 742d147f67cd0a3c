"""Stacks of layers become lists of layers, and back, and train unit by unit."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

import funcshard as fs


class Pair(NamedTuple):
    one: Any
    two: Any


def layers(count: int = 3) -> dict[str, torch.Tensor]:
    return {"w": torch.randn(count, 4, 4), "b": torch.randn(count, 4), "scale": torch.randn(count)}


TREES: dict[str, tuple[Any, str]] = {
    "a dictionary": ({"blocks": layers(), "head": torch.ones(3)}, "blocks"),
    "deep inside": ({"model": [torch.ones(1), {"blocks": layers()}]}, "model.1.blocks"),
    "other containers": (
        Pair(OrderedDict(head=torch.ones(3), blocks=Pair(torch.ones(2, 3), (torch.ones(2),))), 3),
        "one.blocks",
    ),
    "integer keys": ({7: layers(), 8: torch.ones(1)}, "7"),
    "one tensor": ({"w": torch.randn(5, 2)}, "w"),
    "the whole tree": (layers(), ""),
}


@pytest.mark.parametrize("name", TREES)
def test_stack_is_the_inverse_of_unstack(name: str) -> None:
    params, path = TREES[name]
    back = fs.stack(fs.unstack(params, path), path)
    assert fs.make_plan(back, 1) == fs.make_plan(params, 1) if name != "other containers" else type(back) is Pair
    assert repr(back) == repr(params)


def test_layers_are_views_also_on_meta_and_gradients_flow() -> None:
    params = {"blocks": layers()}
    found = fs.unstack(params, "blocks")["blocks"]
    assert len(found) == 3
    assert all(found[i]["w"].data_ptr() == params["blocks"]["w"][i].data_ptr() for i in range(3))
    meta = {"blocks": {"w": torch.empty(2, 3, device="meta")}}
    assert fs.unstack(meta, "blocks")["blocks"][1]["w"].is_meta
    stacked = torch.randn(3, 4, requires_grad=True)
    torch.autograd.backward([layer.sum() * i for i, layer in enumerate(fs.unstack({"w": stacked}, "w")["w"])])
    assert stacked.grad is not None
    assert stacked.grad.unique().tolist() == [0.0, 1.0, 2.0]
    assert fs.unstack({"w": torch.zeros(0, 2)}, "w") == {"w": []}


def test_frozen_gradients_stay_none() -> None:
    grads = {"blocks": [{"w": torch.ones(2), "b": None}, {"w": torch.zeros(2), "b": None}]}
    assert repr(fs.stack(grads, "blocks")) == repr({"blocks": {"w": torch.tensor([[1.0, 1.0], [0.0, 0.0]]), "b": None}})


class Attributes(dict[str, Any]):
    """A dictionary of another library, which no tree knows."""


SAID: dict[str, tuple[Any, type[Exception], str]] = {
    "no such index": (lambda: fs.stack({"a": [1]}, "a.1"), ValueError, "node 'a.1' in the tree: '1' is none of ['0']"),
    "no container of a tree": (
        lambda: fs.stack(Attributes(a=[torch.ones(1)]), "a"), ValueError, "no node 'a' in the tree: 'a' is none of []",
    ),
    "other numbers of layers": (
        lambda: fs.unstack({"a": {"w": torch.ones(2, 3), "b": torch.ones(3)}}, "a"), ValueError,
        "must be tensors of one first dimension, of the size of the number of layers; found [(2,), (3,)]",
    ),
    "an empty list": (lambda: fs.stack({"a": []}, "a"), ValueError, "found list at 'a'"),
    "other shapes": (
        lambda: fs.stack({"a": [{"w": torch.ones(2)}, {"w": torch.ones(3)}]}, "a"), ValueError,
        "layer 1 differs from layer 0, {'w': (torch.Size([3])",
    ),
    "a list of paths": (lambda: fs.unstack({"a": torch.ones(2)}, ["a"]), TypeError, "the dotted path of a node"),
    "a unit of a stack": (
        lambda: fs.make_plan({"blocks": layers()}, 2, units=["blocks.0"]), ValueError,
        "if 'blocks' holds stacked layers, call unstack(params, 'blocks') first",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_a_mistake_is_told(name: str) -> None:
    call, kind, words = SAID[name]
    with pytest.raises(kind, match=re.escape(words)):
        call()
