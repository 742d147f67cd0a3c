"""One of two trees, by a tensor that says which: for graphs, in which Python cannot branch."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from funcshard._utils import tree

__all__ = ["choose_tree", "same_form"]

T = TypeVar("T")


def choose_tree(first: torch.Tensor, one: T, other: T) -> T:
    """Return the tree ``one`` where ``first`` is true, and ``other`` where it is not.

    Arguments:
        first: a boolean scalar.
        one: a tree of tensors and whole numbers.
        other: a tree of the same form.
    """

    def choose(one: Any, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return torch.where(first.to(other.device), one, other)
        if one is other:
            return other
        return other + (one - other) * first.to(torch.int64).item()

    return tree.map(choose, one, other)


def same_form(one: Any, other: Any) -> bool:
    """Return whether two trees differ in their leaves only."""
    return bool(tree.flatten_with_form(one)[1] == tree.flatten_with_form(other)[1])
