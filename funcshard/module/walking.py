"""One walk over a tree of modules, which finds all that ``make_functional`` needs of the tree.

It is quicker than torch's walks, which are generators inside generators, one for each level of the
tree, and of which ``make_functional`` would need eight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

_WALKS = (
    "named_modules",
    "named_parameters",
    "named_buffers",
    "_named_members",
    "modules",
    "parameters",
    "buffers",
)
Modules = list[tuple[str, nn.Module]]
Tensors = dict[str, torch.Tensor]
Names = dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class ModuleTree:
    """The modules and tensors of a tree, in the orders of torch's walks.

    Attributes:
        modules: path and module of every module, parents first. A module with several paths comes
            once, by its first path.
        every: the same with all paths of such a module.
        classes: the classes of the modules.
        parameters: the parameters by their first name.
        parameter_names: first name of each parameter -> all of its names, the first one first.
        buffers: the buffers by their first name.
        buffer_names: first name of each buffer -> all of its names, the first one first.
    """

    modules: Modules
    every: Modules
    classes: frozenset[type[nn.Module]]
    parameters: Tensors
    parameter_names: Names
    buffers: Tensors
    buffer_names: Names


def walk(module: nn.Module) -> ModuleTree:
    """Return the modules and tensors of the tree below ``module``."""
    every: Modules = []
    _visit(module, "", every)
    first: dict[int, tuple[str, nn.Module]] = {}
    for path_module in every:
        first.setdefault(id(path_module[1]), path_module)
    modules = list(first.values())
    classes = frozenset([type(path_module) for _, path_module in modules])
    if not all(
        getattr(cls, name) is getattr(nn.Module, name) for cls in classes for name in _WALKS
    ):
        return _walked_by_torch(module)
    parameters = _named([(path, path_module._parameters) for path, path_module in every])
    buffers = _named([(path, path_module._buffers) for path, path_module in every])
    return ModuleTree(modules, every, classes, *parameters, *buffers)


def _visit(module: nn.Module, path: str, found: Modules) -> None:
    # Why no function inside walk: one that calls itself would keep the modules until the next
    # search for garbage.
    found.append((path, module))
    for name, child in module._modules.items():
        if child is not None:
            _visit(child, f"{path}.{name}" if path else name, found)


def _named(
    tables: Iterable[tuple[str, Mapping[str, torch.Tensor | None]]],
) -> tuple[Tensors, Names]:
    """Return the tensors of the tables, by their first names, and all names of each."""
    tensors: Tensors = {}
    names: Names = {}
    first: dict[int, str] = {}
    for path, table in tables:
        for key, tensor in table.items():
            if tensor is None:
                continue
            name = f"{path}.{key}" if path else key
            first_name = first.setdefault(id(tensor), name)
            if first_name is name:
                tensors[name], names[name] = tensor, (name,)
            else:
                names[first_name] += (name,)
    return tensors, names


def _walked_by_torch(module: nn.Module) -> ModuleTree:
    """Return the tree of a module of which a class walks in a way of its own."""
    modules = list(module.named_modules())
    every = list(module.named_modules(remove_duplicate=False))
    parameters = dict[str, torch.Tensor](module.named_parameters())
    buffers = dict(module.named_buffers())
    return ModuleTree(
        modules,
        every,
        frozenset([type(tree_module) for _, tree_module in modules]),
        parameters,
        _all_names(parameters, module.named_parameters(remove_duplicate=False)),
        buffers,
        _all_names(buffers, module.named_buffers(remove_duplicate=False)),
    )


def _all_names(
    unique: Mapping[str, torch.Tensor], every: Iterable[tuple[str, torch.Tensor]]
) -> Names:
    """Return all names of each tensor in ``unique``, by its name there."""
    first = {id(tensor): name for name, tensor in unique.items()}
    all_names: dict[str, list[str]] = {name: [] for name in unique}
    for name, tensor in every:
        all_names[first[id(tensor)]].append(name)
    return {name: tuple(names) for name, names in all_names.items()}
