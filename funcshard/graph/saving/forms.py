"""Forms of trees and signatures as JSON."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from funcshard._utils import file_data, tree
from funcshard.graph.saving.operations import MOST, decoded, device_from, encoded
from funcshard.graph.signatures import Signature
from funcshard.plan import dtype_name, dtype_of

_PLAIN = (bool, int, float, str, complex)


def form_to(form: Any) -> Any:
    """Return the form of a tree as JSON; ``form_from`` is the inverse."""
    index_tree = tree.build_form(form, range(form.num_leaves))
    try:
        structure, _, _ = tree.describe(index_tree)
    except TypeError as error:
        raise ValueError(f"a file of graphs describes trees as data: {error}") from None
    # Why: dictionaries of the results keep the order in which the step made their keys.
    return _plain(tree.as_inserted(structure, index_tree))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str | float):
        return value
    raise ValueError(
        f"a file of graphs describes trees as data; found the key or metadata {value!r}"
    )


def form_from(data: Any) -> Any:
    """Return the form that ``form_to`` wrote; import no module."""
    return tree.form_of(tree.freeze(data))


def signature_to(signature: Signature) -> Any:
    """Return a signature as JSON; ``signature_from`` is the inverse."""
    inference, *autocast_modes = signature.modes
    return {
        "form": form_to(signature.form),
        "modes": [inference, *([enabled, dtype_name(dtype)] for enabled, dtype in autocast_modes)],
        "conditions": list(signature.conditions),
        "leaves": list(map(_leaf_to, signature.leaves)),
    }


def signature_from(data: Any, device: torch.device) -> Signature:
    """Return the signature that ``signature_to`` wrote, for tensors of a mesh on ``device``."""
    inference, *autocast_modes = data["modes"]
    return Signature(
        form=form_from(data["form"]),
        modes=(
            bool(inference),
            *((bool(enabled), dtype_of(dtype)) for enabled, dtype in autocast_modes),
        ),
        leaves=tuple(_leaf_from(leaf, device) for leaf in data["leaves"]),
        conditions=tuple(data["conditions"]),
    )


def _leaf_to(leaf: Any) -> Any:
    if leaf is int:
        return "a counter"
    if len(leaf) == 2:
        leaf_type, value = leaf
        # Note: a leaf without a hash is its repr here, of another type than its own.
        if leaf_type not in _PLAIN or type(value) is not leaf_type:
            raise ValueError(
                "a file of graphs holds numbers and texts of the batch; found a leaf of type "
                f"{leaf_type.__name__}: pass it as a tensor, or keep it out of the batch"
            )
        return {"value": encoded(value, {})}
    shape, dtype, device, stride, requires_grad = leaf
    stride_data = None if stride is None else list(stride)
    return [dtype_name(dtype), list(shape), stride_data, device.type, requires_grad]


def _leaf_from(data: Any, device: torch.device) -> Hashable:
    if data == "a counter":
        return int
    if isinstance(data, dict):
        value = decoded(data["value"], {}, device)
        if type(value) not in _PLAIN:
            raise ValueError(f"found a leaf {value!r}")
        return type(value), value
    dtype, shape, stride, device_type, requires_grad = data
    size_numbers = [size for size in shape if type(size) is not str]
    is_named = len(size_numbers) < len(shape)
    if stride is None and not is_named:
        # Note: strides are left out only where a size with a name decides them.
        raise ValueError(f"found a tensor of shape {shape} without strides")
    file_data.numbers("the shape of an input", size_numbers, 0, MOST - 1)
    if stride is not None:
        stride = file_data.numbers("the strides of an input", stride, 0, MOST - 1)
    return (
        # Why: the sizes of an argument are a torch.Size, which a tuple with names cannot be.
        tuple(shape) if is_named else torch.Size(shape),
        dtype_of(dtype),
        device_from(device_type, device),
        stride,
        file_data.flag("whether an input requires a gradient", requires_grad),
    )
