"""Walks over modules and tensors against torch's own."""

import pytest
import torch
from torch import nn

from funcshard.module.walking import walk


def shared():
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    outer = nn.ModuleDict({"a": inner, "b": nn.ModuleList([inner, nn.Linear(2, 2, bias=False)]), "c": nn.Identity()})
    outer["b"][1].weight = inner[0].weight
    outer.register_module("none", None)
    outer.register_buffer("lost", None)
    outer.register_buffer("also", inner[1].running_mean)
    return outer


class Renamed(nn.Sequential):
    """A module that names its tensors in a way of its own, as torch's wrappers do."""

    def named_parameters(self, *args, **kwargs):
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield f"own_{name}", parameter


MODELS = {"a layer": lambda: nn.Linear(2, 3), "shared modules": shared, "own names": lambda: Renamed(nn.Linear(2, 2))}


@pytest.mark.parametrize("name", MODELS)
def test_one_walk_finds_what_the_walks_of_torch_find(name):
    module = MODELS[name]()
    tree = walk(module)
    assert tree.modules == list(module.named_modules())
    assert tree.every == list(module.named_modules(remove_duplicate=False))
    assert tree.classes == {type(m) for m in module.modules()}
    kinds = {"parameters": (tree.parameters, tree.parameter_names), "buffers": (tree.buffers, tree.buffer_names)}
    for kind, (tensors, names) in kinds.items():
        every = [(id(tensor), name) for name, tensor in getattr(module, f"named_{kind}")(remove_duplicate=False)]
        assert [(name, id(tensor)) for name, tensor in tensors.items()] == [
            (name, id(tensor)) for name, tensor in getattr(module, f"named_{kind}")()
        ]
        assert names == {name: tuple(n for i, n in every if i == id(tensor)) for name, tensor in tensors.items()}
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
