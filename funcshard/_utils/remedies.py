"""Advice for the habits of other libraries, in the errors of this one.

A module where its function belongs, ``sharded.eval()``, ``optimizer.zero_grad()``: such a call is
right in torch, so its error names the call that does the same here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def absent(title: str, name: str, remedies: Mapping[str, str]) -> AttributeError:
    """Return the error for an attribute that an object lacks, with what to do if that's known.

    Arguments:
        title: the object, as text.
        name: the attribute.
        remedies: what to do for each attribute that torch's object of this kind has.

    Example:
        >>> from funcshard._utils import absent
        >>> str(absent("a step", "zero_grad", {"zero_grad": "leave it out"}))
        "a step has no attribute 'zero_grad': leave it out"
    """
    remedy = remedies.get(name)
    return AttributeError(
        f"{title} has no attribute {name!r}{f': {remedy}' if remedy else ''}", name=name
    )


def outline(value: Any) -> str:
    """Return what a value is, for an error: a dictionary's first names, a shape, or a class.

    Example:
        >>> import torch
        >>> from funcshard._utils import outline
        >>> outline({"a": 1}), outline(torch.ones(2)), outline(3)
        ("['a']", 'a tensor of shape (2,)', 'int')
    """
    if isinstance(value, Mapping):
        return str(list(value)[:4])
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def module_remedy(value: Any, result: str) -> str:
    """Return the end of an error for a value that is a module; nothing if it is none.

    Arguments:
        value: any value.
        result: the result of ``make_functional`` that belongs in its place, such as ``"apply"``.
    """
    if not isinstance(value, nn.Module):
        return ""
    return f"call apply, params, buffers = fs.make_functional(module) first, and pass {result} instead of the module"


def is_tree_of_shards(tree: Any) -> bool:
    """Return whether a dictionary has the form of shards: dictionaries by unit of tensors."""
    return (
        isinstance(tree, Mapping)
        and bool(tree)
        and all(isinstance(entry, Mapping) for entry in tree.values())
    )
