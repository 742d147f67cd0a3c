"""The arguments of operations, and constant results, as JSON.

A node is ``"%3"``, and a text begins with an apostrophe. Numbers, ``true``, ``false``, ``null`` and
lists are themselves. All else is an object with one key, such as ``{"dtype": "float32"}``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from funcshard.plan import dtype_name, dtype_of

MOST = 2**47  # bytes or elements: more than any machine addresses
_LARGEST = 2**63  # of torch's integers

_LAYOUTS = {"strided": torch.strided}
_FORMATS = {
    name: getattr(torch, name)
    for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
}


def encoded(value: Any, names: Mapping[fx.Node, str]) -> Any:
    """Return an argument as JSON; ``decoded`` is the inverse, but for tuples, which become lists.

    Arguments:
        value: the argument.
        names: a name for each node.

    Raises:
        ValueError: the value cannot be in a file.
    """
    if isinstance(value, fx.Node):
        return names[value]
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, str):
        return f"'{value}"
    if isinstance(value, tuple | list):
        return [encoded(item, names) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": value.type}  # ranks have devices of other numbers
    for value_kind, known_values in (("layout", _LAYOUTS), ("memory_format", _FORMATS)):
        for name, known_value in known_values.items():
            if known_value is value:
                return {value_kind: name}
    if isinstance(value, complex):
        return {"complex": [encoded(value.real, names), encoded(value.imag, names)]}
    raise ValueError(
        f"a file of graphs holds tensors, numbers, texts and dtypes; found {value!r} of type "
        f"{type(value).__name__}: keep such values out of the batch and of the metrics"
    )


def decoded(data: Any, nodes: Mapping[str, fx.Node], device: torch.device) -> Any:
    """Return the argument that ``encoded`` wrote.

    Arguments:
        data: the JSON.
        nodes: the nodes so far, by name.
        device: the device of the mesh.

    Raises:
        ValueError: ``encoded`` cannot have written that.
    """
    if data is None or isinstance(data, bool | float):
        return data
    if isinstance(data, int):
        if abs(data) >= _LARGEST:
            raise ValueError(f"found the number {data}, which is too large for torch")
        return data
    if isinstance(data, str):
        if data[:1] == "'":
            return data[1:]
        if data not in nodes:
            raise ValueError(f"found {data!r}, which no operation before it is named")
        return nodes[data]
    if isinstance(data, list):
        return [decoded(item, nodes, device) for item in data]
    if isinstance(data, dict) and len(data) == 1:
        ((value_kind, coded_value),) = data.items()
        if value_kind == "float" and coded_value in ("inf", "-inf", "nan"):
            return float(coded_value)
        if value_kind == "dtype" and isinstance(coded_value, str):
            return dtype_of(coded_value)
        if value_kind == "device" and isinstance(coded_value, str):
            return device_from(coded_value, device)
        if value_kind == "layout" and coded_value in _LAYOUTS:
            return _LAYOUTS[coded_value]
        if value_kind == "memory_format" and coded_value in _FORMATS:
            return _FORMATS[coded_value]
        if value_kind == "complex":
            real, imag = decoded(coded_value, {}, device)
            return complex(real, imag)
    raise ValueError(f"found {str(data)[:60]}, which stands for no value")


def device_from(kind: str, device: torch.device) -> torch.device:
    """Return the device of a type: that of the mesh, if it is of this type."""
    if kind not in ("cpu", "meta", "cuda", device.type):
        raise ValueError(f"found the device {kind!r}")
    return device if device.type == kind else torch.device(kind)
