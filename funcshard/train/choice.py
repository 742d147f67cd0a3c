"""One of two trees, by a tensor that says which: for graphs, in which Python cannot branch."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch

from funcshard._utils import tree

T = TypeVar("T")


def choose_tree(first: torch.Tensor, one: T, other: T) -> T:
    """Return the tree ``one`` where ``first`` is true, and ``other`` where it is not.

    Arguments:
        first: a boolean scalar.
        one: a tree of tensors and whole numbers.
        other: a tree of the same form.
    """

    # Why once: the host waits for each copy to the CPU, and for each number.
    flag_on = functools.cache(first.to)
    flag_number = functools.cache(lambda: first.to(torch.int64).item())

    def choose(one: Any, other: Any) -> Any:
        if one is other:
            return other
        if isinstance(other, torch.Tensor):
            return torch.where(flag_on(other.device), one, other)
        return other + (one - other) * flag_number()

    return tree.map(choose, one, other)


def same_form(one: Any, other: Any) -> bool:
    """Return whether two trees differ in their leaves only."""
    return bool(tree.flatten_with_form(one)[1] == tree.flatten_with_form(other)[1])
