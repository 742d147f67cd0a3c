"""Walks over modules and tensors against torch's own."""

import pytest
import torch
from torch import nn

from funcshard.module.walking import named_modules, named_tensors


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


@pytest.mark.parametrize("unique", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_walks_are_those_of_torch(name, unique):
    module = MODELS[name]()
    modules = named_modules(module, unique=unique)
    assert modules == list(module.named_modules(remove_duplicate=unique))
    for kind in ("parameters", "buffers"):
        found = list(named_tensors(module, kind, modules, unique=unique))
        expected = list(getattr(module, f"named_{kind}")(remove_duplicate=unique))
        assert [(path, id(tensor)) for path, tensor in found] == [(path, id(tensor)) for path, tensor in expected]
        assert all(isinstance(tensor, torch.Tensor) for _, tensor in found)
