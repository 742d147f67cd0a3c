"""Functions that captured modules: copies of them for one call, which capture the call's modules.

A module may hold a plain function whose closure refers to modules of the tree, such as a
``forward`` that was wrapped in another function. ``copy.deepcopy`` returns such a function itself.
A ``Rebinding`` makes a copy of the function with other cells in its closure.
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

__all__ = ["Rebinding", "copied", "rebind", "references"]


@dataclass(frozen=True, slots=True, eq=False)
class Rebinding:
    """A function that captured modules.

    Attributes:
        function: the function.
        followed: positions of the cells of its closure that lead to a module or tensor of the tree;
            its copies share the other cells.
    """

    function: types.FunctionType
    followed: tuple[int, ...]

    def copy(self) -> types.FunctionType:
        """Return a copy whose followed cells are empty."""
        old = self.function
        cells = list(old.__closure__ or ())
        for number in self.followed:
            cells[number] = types.CellType()
        new = types.FunctionType(old.__code__, old.__globals__, old.__name__, old.__defaults__, tuple(cells))
        new.__kwdefaults__, new.__qualname__ = old.__kwdefaults__, old.__qualname__
        new.__dict__.update(old.__dict__)
        return new

    def fill(self, new: types.FunctionType, memo: dict[int, Any]) -> None:
        """Fill the empty cells of a copy with copies of the values that the function captured."""
        for number in self.followed:
            old_cell, new_cell = (self.function.__closure__ or ())[number], (new.__closure__ or ())[number]
            new_cell.cell_contents = copied(old_cell.cell_contents, memo)


def references(values: Iterable[Any], tree: Collection[int]) -> tuple[tuple[Rebinding, ...], tuple[Any, ...]]:
    """Return what copies of attributes of modules need besides the modules and tensors of the tree.

    Arguments:
        values: the attributes.
        tree: ids of the modules and tensors of the tree.

    Returns:
        A rebinding for each function that captured a part of the tree, and the objects that are not
        copied: DeviceMeshes, which stand for connections between ranks, and functions of torch.jit,
        which have no state and cannot be copied.
    """
    functions: dict[int, Rebinding] = {}
    shared: dict[int, Any] = {}
    for value in {id(value): value for value in values}.values():
        for found in reachable(value):
            if isinstance(found, (DeviceMesh, torch.jit.ScriptFunction)):
                shared[id(found)] = found
            elif isinstance(found, types.FunctionType) and found.__closure__ and id(found) not in functions:
                followed = tuple(n for n, cell in enumerate(found.__closure__) if _leads(cell, tree))
                if followed:
                    functions[id(found)] = Rebinding(found, followed)
    return tuple(functions.values()), tuple(shared.values())


def _leads(cell: types.CellType, tree: Collection[int]) -> bool:
    try:
        return any(id(each) in tree for each in reachable(cell.cell_contents))
    except ValueError:  # an empty cell
        return False


def rebind(rebindings: Iterable[Rebinding], memo: dict[int, Any]) -> list[tuple[Rebinding, types.FunctionType]]:
    """Put a copy of each function into ``memo``, and return the copies, whose cells are to fill."""
    made = [(each, each.copy()) for each in rebindings]
    memo.update((id(each.function), new) for each, new in made)
    return made


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of ``value`` under ``memo``, which may hold copies of functions too."""
    # Why here: new versions of Python copy a function without a look at the memo.
    found = memo.get(id(value)) if isinstance(value, types.FunctionType) else None
    return copy.deepcopy(value, memo) if found is None else found
