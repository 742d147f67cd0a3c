"""Dtypes by name."""

from __future__ import annotations

import re

import torch

_NAMED = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

# Dtypes for which torch lacks most operations: below a byte, and bits without a meaning.
_NO_NUMBERS = re.compile(r"bits\w+|u?int[1-7]|float4\w+|qu?int\w+")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``"float32"``; the inverse of ``dtype_of``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name, such as ``torch.float32``; the inverse of ``dtype_name``.

    Raises:
        ValueError: torch has no dtype of this name.
    """
    # Why not getattr: torch imports modules in its __getattr__, and a file may give the name.
    dtype = _NAMED.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"{name!r} is not the name of a torch dtype")
    return dtype


def has_numbers(dtype: torch.dtype) -> bool:
    """Return whether torch can fill, compare and read tensors of a dtype.

    Example:
        >>> import torch
        >>> has_numbers(torch.float8_e5m2), has_numbers(torch.bits8)
        (True, False)
    """
    return not _NO_NUMBERS.fullmatch(dtype_name(dtype))
