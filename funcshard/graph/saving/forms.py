"""The form of trees, and the facts about arguments that a graph depends on, as JSON."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from funcshard._utils import tree
from funcshard.graph.saving.values import MOST, decoded, device_from, encoded
from funcshard.graph.signatures import Signature
from funcshard.plan import dtype_name, dtype_of

_PLAIN: dict[str, type] = {
    plain_type.__name__: plain_type for plain_type in (bool, int, float, str, complex)
}


def form_to(form: Any) -> Any:
    """Return the form of a tree as JSON; ``form_from`` is the inverse.

    Raises:
        ValueError: a container of the tree cannot be described as data.
    """
    built = tree.build_form(form, range(form.num_leaves))
    try:
        structure, _, _ = tree.describe(built)
    except TypeError as error:
        raise ValueError(f"a file of graphs describes trees as data: {error}") from None
    # Why: dictionaries of the results keep the order in which the step made their keys.
    return _plain(tree.as_inserted(structure, built))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str | float):
        return value
    raise ValueError(
        f"a file of graphs describes trees as data; found the key or metadata {value!r}"
    )


def form_from(data: Any) -> Any:
    """Return the form that ``form_to`` wrote. Classes are looked up, and no module is imported.

    Raises:
        ValueError: it is no form, or a class of it is not loaded.
    """
    return tree.form_of(tree.freeze(data))


def signature_to(signature: Signature) -> Any:
    """Return a signature as JSON; ``signature_from`` is the inverse."""
    inference, *autocast = signature.modes
    modes = [inference, *([enabled, dtype_name(dtype)] for enabled, dtype in autocast)]
    leaves = [_leaf_to(leaf) for leaf in signature.leaves]
    return {
        "form": form_to(signature.form),
        "modes": modes,
        "conditions": list(signature.conditions),
        "leaves": leaves,
    }


def signature_from(data: Any, device: torch.device) -> Signature:
    """Return the signature that ``signature_to`` wrote, for tensors of a mesh on ``device``."""
    inference, *autocast = data["modes"]
    modes = (bool(inference), *((bool(enabled), dtype_of(dtype)) for enabled, dtype in autocast))
    leaves = tuple(_leaf_from(leaf, device) for leaf in data["leaves"])
    return Signature(form_from(data["form"]), modes, leaves, tuple(data["conditions"]))


def _leaf_to(leaf: Any) -> Any:
    if leaf is int:
        return "a counter"
    if len(leaf) == 2:
        leaf_kind, value = leaf
        if leaf_kind.__name__ not in _PLAIN or type(value) is not leaf_kind:
            raise ValueError(
                "a file of graphs holds numbers and texts of the batch; found a leaf of type "
                f"{leaf_kind.__name__}: pass it as a tensor, or keep it out of the batch"
            )
        return {"value": encoded(value, {})}
    shape, dtype, device, stride, requires_grad = leaf
    return [
        dtype_name(dtype),
        list(shape),
        None if stride is None else list(stride),
        device.type,
        requires_grad,
    ]


def _leaf_from(data: Any, device: torch.device) -> Hashable:
    if data == "a counter":
        return int
    if isinstance(data, dict):
        value = decoded(data["value"], {}, device)
        if type(value) not in _PLAIN.values():
            raise ValueError(f"found a leaf {value!r}")
        return type(value), value
    dtype, shape, stride, leaf_kind, requires_grad = data
    numbers = (*(size for size in shape if type(size) is not str), *(stride or ()))
    if (
        not all(type(size_value) is int and 0 <= size_value < MOST for size_value in numbers)
        or type(requires_grad) is not bool
    ):
        raise ValueError(f"found a tensor of shape {shape} and stride {stride}")
    named = len(numbers) < len(shape) + len(stride or ())
    if not named and stride is None:
        raise ValueError(f"found a tensor of shape {shape} without strides")
    strides = None if stride is None else tuple(stride)
    return (
        tuple(shape) if named else torch.Size(shape),
        dtype_of(dtype),
        device_from(leaf_kind, device),
        strides,
        requires_grad,
    )
