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
        for number in self.followed:
            cells[number] = types.CellType()
        new = types.FunctionType(
            old.__code__, old.__globals__, old.__name__, old.__defaults__, tuple(cells)
        )
        new.__kwdefaults__, new.__qualname__ = old.__kwdefaults__, old.__qualname__
        new.__dict__.update(old.__dict__)
        return new

    def fill(self, new: types.FunctionType, memo: dict[int, Any]) -> None:
        """Give a copy what the function captured, copied: the contents of cells, and defaults."""
        for number in self.followed:
            old_cell = (self.function.__closure__ or ())[number]
            new_cell = (new.__closure__ or ())[number]
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
        functions, and the objects that are not copied: DeviceMeshes, which stand for connections
        between ranks, and functions of torch.jit, which have no state and cannot be copied.
    """
    functions: dict[int, Rebinding] = {}
    methods: dict[int, types.MethodType] = {}
    shared: dict[int, Any] = {}
    for value in {id(value): value for value in values}.values():
        for reached_value in reachable(value):
            if issubclass(type(reached_value), (DeviceMesh, torch.jit.ScriptFunction)):
                shared[id(reached_value)] = reached_value
            elif (
                isinstance(reached_value, types.FunctionType) and id(reached_value) not in functions
            ):
                followed = tuple(
                    n
                    for n, cell in enumerate(reached_value.__closure__ or ())
                    if _leads(cell, tree)
                )
                defaults = _leads(reached_value.__defaults__, tree) or _leads(
                    reached_value.__kwdefaults__, tree
                )
                if followed or defaults:
                    functions[id(reached_value)] = Rebinding(reached_value, followed, defaults)
            elif isinstance(reached_value, types.MethodType):
                methods[id(reached_value)] = reached_value
    rebound = [
        method
        for method in methods.values()
        if (
            id(method.__func__) in functions
            if isinstance(method.__func__, types.FunctionType)
            else _leads(method, tree)
        )
    ]
    return (*functions.values(), *rebound), tuple(shared.values())


def _leads(value: Any, tree: Collection[int]) -> bool:
    return value is not None and any(
        id(reached_value) in tree for reached_value in reachable(value)
    )


def rebind(
    rebindings: Rebindings, memo: dict[int, Any]
) -> tuple[dict[int, Any], list[tuple[Rebinding, types.FunctionType]]]:
    """Return a memo with a copy of each function, and the copies, which are to fill later.

    The memo is that of the arguments, or one that begins with what it holds.
    """
    made_functions = [
        (rebinding, rebinding.copy())
        for rebinding in rebindings
        if isinstance(rebinding, Rebinding)
    ]
    memo.update((id(rebinding.function), new) for rebinding, new in made_functions)
    methods = {
        id(rebinding): rebinding
        for rebinding in rebindings
        if isinstance(rebinding, types.MethodType)
    }
    return (_MethodsToo(memo, methods) if methods else memo), made_functions


class _MethodsToo(dict[int, Any]):
    """A memo of ``copy.deepcopy`` that copies bound methods when they are asked for.

    Not before, because the object that a method is bound to may have no copy yet.
    """

    def __init__(self, memo: dict[int, Any], methods: dict[int, types.MethodType]) -> None:
        super().__init__(memo)
        self.methods = methods

    def get(self, key: int, default: Any = None) -> Any:
        bound_method = super().get(key, self)
        if bound_method is self and key in self.methods:
            method = self.methods[key]
            bound_method = self[key] = types.MethodType(
                copied(method.__func__, self), copied(method.__self__, self)
            )
        return default if bound_method is self else bound_method


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of ``value`` under ``memo``, which may hold copies of functions too."""
    # Why here: new versions of Python copy a function without a look at the memo.
    copied_function = memo.get(id(value)) if isinstance(value, types.FunctionType) else None
    return copy.deepcopy(value, memo) if copied_function is None else copied_function
