"""Names of dtypes: a plan holds dtypes by name, because a plan is plain data."""

from __future__ import annotations

import torch

__all__ = ["dtype_name", "dtype_of"]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``"float32"``; the inverse of ``dtype_of``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name, such as ``torch.float32``; the inverse of ``dtype_name``.

    Raises:
        ValueError: torch has no dtype of this name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not the name of a torch dtype; found in a plan, so the plan is damaged")
    return dtype
