"""Functions that captured modules: copies of them for one call, which capture the call's modules.

A module may hold a plain function whose closure or defaults refer to modules of the tree, such as a
``forward`` that was wrapped in another function. ``copy.deepcopy`` returns such a function itself.
A ``Rebinding`` makes a copy of the function with other cells in its closure, and other defaults.

The copy that ``copy.deepcopy`` makes of a bound method keeps the function, too. ``rebind`` returns
a memo that copies the bound methods of such functions, and of partials, with their functions.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from funcshard._utils import reachable


@dataclass(frozen=True, slots=True, eq=False)
class Rebinding:
    """A function that captured modules.

    Attributes:
        function: the function.
        followed: positions of the cells of its closure that lead to a module or tensor of the tree;
            its copies share the other cells.
        defaults: whether default values of its arguments lead there.
    """

    function: types.FunctionType
    followed: tuple[int, ...]
    defaults: bool = False

    def copy(self) -> types.FunctionType:
        """Return a copy whose followed cells are empty."""
        old = self.function
        cells = list(old.__closure__ or ())
        for cell_index in self.followed:
            cells[cell_index] = types.CellType()
        new = types.FunctionType(
            old.__code__, old.__globals__, old.__name__, old.__defaults__, tuple(cells)
        )
        new.__kwdefaults__, new.__qualname__ = old.__kwdefaults__, old.__qualname__
        new.__dict__.update(old.__dict__)
        return new

    def fill(self, new: types.FunctionType, memo: dict[int, Any]) -> None:
        """Give a copy what the function captured, copied: the contents of cells, and defaults."""
        for cell_index in self.followed:
            old_cell = (self.function.__closure__ or ())[cell_index]
            new_cell = (new.__closure__ or ())[cell_index]
            new_cell.cell_contents = copied(old_cell.cell_contents, memo)
        if self.defaults:
            new.__defaults__ = copied(self.function.__defaults__, memo)
            new.__kwdefaults__ = copied(self.function.__kwdefaults__, memo)


Rebindings = tuple[Rebinding | types.MethodType, ...]
"""The functions to copy, and the bound methods that are copied with their functions."""


def references(values: Iterable[Any], tree: Collection[int]) -> tuple[Rebindings, tuple[Any, ...]]:
    """Return what copies of attributes of modules need besides the modules and tensors of the tree.

    Arguments:
        values: the attributes.
        tree: ids of the modules and tensors of the tree.

    Returns:
        A rebinding for each function that captured a part of the tree, the bound methods of such
        functions, and the objects that are not copied: DeviceMeshes, which represent connections
        between ranks, and functions of torch.jit, which have no state and cannot be copied.
    """
    functions: dict[int, Rebinding] = {}
    methods: list[types.MethodType] = []
    shared: list[Any] = []
    distinct = {id(value): value for value in values}.values()
    inner = {id(item): item for value in distinct for item in reachable(value)}
    for item in inner.values():
        # Why by class: isinstance of a DeviceMesh reads an attribute of the object in torch 2.12.
        if issubclass(type(item), (DeviceMesh, torch.jit.ScriptFunction)):
            shared.append(item)
        elif isinstance(item, types.MethodType):
            methods.append(item)
        elif isinstance(item, types.FunctionType):
            cells = item.__closure__ or ()
            followed = tuple(n for n, cell in enumerate(cells) if _leads(cell, tree))
            defaults = _leads(item.__defaults__, tree) or _leads(item.__kwdefaults__, tree)
            if followed or defaults:
                functions[id(item)] = Rebinding(item, followed, defaults)
    rebound = [
        method
        for method in methods
        if (
            id(method.__func__) in functions
            if isinstance(method.__func__, types.FunctionType)
            else _leads(method, tree)
        )
    ]
    return (*functions.values(), *rebound), tuple(shared)


def _leads(value: Any, tree: Collection[int]) -> bool:
    return value is not None and any(id(item) in tree for item in reachable(value))


def rebind(
    rebindings: Rebindings, memo: dict[int, Any]
) -> tuple[dict[int, Any], list[tuple[Rebinding, types.FunctionType]]]:
    """Return a memo with a copy of each function, and the copies, which are to fill later.

    The memo is that of the arguments, or one that begins with what it holds.
    """
    copies = [(r, r.copy()) for r in rebindings if isinstance(r, Rebinding)]
    memo.update((id(rebinding.function), function) for rebinding, function in copies)
    methods = {id(m): m for m in rebindings if isinstance(m, types.MethodType)}
    return (_MethodsToo(memo, methods) if methods else memo), copies


class _MethodsToo(dict[int, Any]):
    """A memo of ``copy.deepcopy`` that copies bound methods when they are asked for.

    Not before, because the object that a method is bound to may have no copy yet.
    """

    def __init__(self, memo: dict[int, Any], methods: dict[int, types.MethodType]) -> None:
        super().__init__(memo)
        self.methods = methods

    def get(self, key: int, default: Any = None) -> Any:
        if key not in self and key in self.methods:
            method = self.methods[key]
            self[key] = types.MethodType(
                copied(method.__func__, self), copied(method.__self__, self)
            )
        return super().get(key, default)


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of ``value`` under ``memo``, which may hold copies of functions too."""
    # Why here: new versions of Python copy a function without a look at the memo.
    if isinstance(value, types.FunctionType) and id(value) in memo:
        return memo[id(value)]
    return copy.deepcopy(value, memo)
