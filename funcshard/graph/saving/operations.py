"""Operations and their arguments as JSON.

A name may only be that of an operator of torch or funcshard that reads and writes no files, or of a
function on numbers.

In arguments, a node is ``"%3"``, and a text begins with an apostrophe. Numbers, ``true``,
``false``, ``null`` and lists are themselves. All else is an object such as ``{"dtype":
"float32"}``.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from funcshard._utils.torch_operators import operator_by_name, operator_full_name
from funcshard.plan import dtype_name, dtype_of

_SPACES = ("aten", "prims", "funcshard")
_NAME = re.compile(r"([A-Za-z0-9_]+)::([A-Za-z0-9_]+)\.([A-Za-z0-9_]+)")

# Why these: torch computes with numbers of a recording by them.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        f"operator.{name}": getattr(operator, name)
        for name in (
            "abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "le", "lt", "mod", "mul", "ne", "neg", "or_",
            "pow", "sub", "truediv",
        )
    },
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc")},
    **{
        f"torch.{name}": getattr(torch, name)
        for name in ("sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not")
    },
}  # fmt: skip
_FUNCTION_NAMES = {function: name for name, function in FUNCTIONS.items()}

_REFUSED = {"from_file", "_print", "set_data"}

# By the key of the object that stands for each in a file.
_NAMED: dict[str, dict[str, Any]] = {
    "layout": {"strided": torch.strided},
    "memory_format": {
        name: getattr(torch, name)
        for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
    },
    "float": {"inf": math.inf, "-inf": -math.inf, "nan": math.nan},
}


def target_name(target: Any) -> str:
    """Return the name of an operation for a file; ``operator_of`` is the inverse."""
    if full_name := operator_full_name(target):
        _check(full_name)
        return full_name
    try:
        return _FUNCTION_NAMES[target]
    except (KeyError, TypeError):
        name = getattr(target, "__name__", target)
        raise _error(f"{getattr(target, '__module__', '?')}.{name}") from None


def operator_of(name: str) -> Any:
    """Return the operation of a name."""
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    named_operator = operator_by_name(*_check(name))
    if named_operator is None:
        raise ValueError(
            f"the file holds the operation {name!r}, and this torch ({torch.__version__}) has none "
            "of that name"
        )
    return named_operator


def _check(name: str) -> tuple[str, str, str]:
    name_match = _NAME.fullmatch(name)
    if name_match is None or name_match[1] not in _SPACES or name_match[2] in _REFUSED:
        raise _error(name)
    return name_match[1], name_match[2], name_match[3]


def _error(name: str) -> ValueError:
    return ValueError(
        f"a file of graphs holds operators of {', '.join(_SPACES)} and arithmetic of numbers, "
        f"because reading a file must not run other code; found {name!r}"
    )


# --- arguments ------------------------------------------------------------------------------------


def encoded(value: Any, names: Mapping[fx.Node, str]) -> Any:
    """Return an argument as JSON; ``decoded`` is the inverse, with lists for tuples."""
    if isinstance(value, fx.Node):
        return names[value]
    if value is None or type(value) in (bool, int):
        return value
    if isinstance(value, str):
        return f"'{value}"
    if isinstance(value, tuple | list):
        return [encoded(item, names) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": value.type}  # ranks have devices of other numbers
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [encoded(value.real, names), encoded(value.imag, names)]}
    for key, named_values in _NAMED.items():
        for name, named_value in named_values.items():
            if named_value is value:
                return {key: name}
    raise ValueError(
        f"a file of graphs holds tensors, numbers, texts and dtypes; found {value!r} of type "
        f"{type(value).__name__}: keep such values out of the batch and of the metrics"
    )


def decoded(data: Any, nodes: Mapping[str, fx.Node], device: torch.device) -> Any:
    """Return the argument that ``encoded`` wrote."""
    if isinstance(data, str):
        return data[1:] if data.startswith("'") else nodes[data]
    if isinstance(data, list):
        return [decoded(item, nodes, device) for item in data]
    if not isinstance(data, dict):
        return data
    ((key, coded_value),) = data.items()
    if key == "complex":
        return complex(*decoded(coded_value, {}, device))
    if key == "dtype":
        return dtype_of(coded_value)
    if key == "device":
        return device_from(coded_value, device)
    return _NAMED[key][coded_value]


def device_from(device_type: str, device: torch.device) -> torch.device:
    """Return the mesh's device if it's of this type, or else a device of this type."""
    # Note: a rank's tensors are on its own GPU, whatever number the one that saved had.
    return device if device.type == device_type else torch.device(device_type)
