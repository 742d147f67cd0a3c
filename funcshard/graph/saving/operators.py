"""The operations that a file of graphs may hold, by name.

A file is data, so a name must not reach other code: an operator of torch or of funcshard, or one of
a few functions on numbers. Operators that read or write files are not among them.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from funcshard._utils import operator_by_name, operator_full_name

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
_NAMES = {function: name for name, function in FUNCTIONS.items()}

_REFUSED = {"from_file", "_print", "set_data"}


def target_name(target: Any) -> str:
    """Return the name of an operation for a file; ``operator_of`` is the inverse.

    Raises:
        ValueError: a file cannot hold the operation.
    """
    name = operator_full_name(target)
    if name:
        _check(name)
        return name
    try:
        return _NAMES[target]
    except (KeyError, TypeError):
        raise ValueError(
            _outside(f"{getattr(target, '__module__', '?')}.{getattr(target, '__name__', target)}")
        ) from None


def operator_of(name: str) -> Any:
    """Return the operation of a name.

    Raises:
        ValueError: it is none that a file may hold, or this version of torch lacks it.
    """
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    space, packet, overload = _check(name)
    named_operator = operator_by_name(space, packet, overload)
    if named_operator is None:
        raise ValueError(
            f"the file holds the operation {name!r}, and this torch ({torch.__version__}) has none "
            "of that name"
        )
    return named_operator


def _check(name: str) -> tuple[str, str, str]:
    match = _NAME.fullmatch(name)
    if match is None or match[1] not in _SPACES or match[2] in _REFUSED:
        raise ValueError(_outside(name))
    return match[1], match[2], match[3]


def _outside(name: str) -> str:
    return (
        f"a file of graphs holds operators of {', '.join(_SPACES)} and arithmetic of numbers, "
        f"because reading a file must not run other code; found {name!r}"
    )
