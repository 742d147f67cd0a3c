"""What ``make_functional`` has to know of a tree of modules: paths, tensors and their names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

Tensors = dict[str, torch.Tensor]
Names = dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class ModuleTree:
    """The modules and tensors of a tree, in the orders of torch's walks.

    Attributes:
        modules: path and module of every module, parents first. A module with several paths comes
            once, by its first path.
        parameters: the parameters by their first name.
        parameter_names: first name of each parameter -> all of its names, the first one first.
        buffers: the buffers by their first name.
        buffer_names: first name of each buffer -> all of its names, the first one first.
    """

    modules: list[tuple[str, nn.Module]]
    parameters: Tensors
    parameter_names: Names
    buffers: Tensors
    buffer_names: Names


def walk(module: nn.Module) -> ModuleTree:
    """Return the modules and tensors of the tree below ``module``."""
    parameters, parameter_names = _by_name(module.named_parameters(remove_duplicate=False))
    buffers, buffer_names = _by_name(module.named_buffers(remove_duplicate=False))
    return ModuleTree(
        modules=list(module.named_modules()),
        parameters=parameters,
        parameter_names=parameter_names,
        buffers=buffers,
        buffer_names=buffer_names,
    )


def _by_name(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[Tensors, Names]:
    """Return the tensors by their first names, and all names of each."""
    first_names: dict[int, str] = {}
    by_name: Tensors = {}
    names: Names = {}
    for name, tensor in tensors:
        first_name = first_names.setdefault(id(tensor), name)
        by_name[first_name] = tensor
        names[first_name] = (*names.get(first_name, ()), name)
    return by_name, names
