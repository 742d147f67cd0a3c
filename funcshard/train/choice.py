"""One of two trees, by a tensor that says which: for graphs, in which Python cannot branch."""

from __future__ import annotations

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
    on_device = {first.device: first}
    flag_value: Any = None

    def choose(one: Any, other: Any) -> Any:
        nonlocal flag_value
        if isinstance(other, torch.Tensor):
            if other.device not in on_device:
                on_device[other.device] = first.to(other.device)
            return torch.where(on_device[other.device], one, other)
        if one is other:
            return other
        if flag_value is None:
            flag_value = first.to(torch.int64).item()
        return other + (one - other) * flag_value

    return tree.map(choose, one, other)


def same_form(one: Any, other: Any) -> bool:
    """Return whether two trees differ in their leaves only."""
    return bool(tree.flatten_with_form(one)[1] == tree.flatten_with_form(other)[1])
