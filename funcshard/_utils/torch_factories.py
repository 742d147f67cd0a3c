"""The device on which torch makes tensors that name none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from funcshard._utils.torch_names import private

__all__ = ["with_plain_factories"]

# Why 1: then the context below is always one, which costs time only.
_modes: Callable[[], int] = private("torch._C._len_torch_function_stack", "optimizers of torch", lambda: 1)


def with_plain_factories() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which tensors that name no device are made on the CPU.

    Inside ``with torch.device("meta")`` they are not: the state of an optimizer of torch, which
    makes its counters in this way, would have no values there.

    Example:
        >>> import torch
        >>> with torch.device("meta"), with_plain_factories():
        ...     torch.zeros(1).device
        device(type='cpu')
    """
    # Why only there: a mode of any kind costs time for each operation.
    return torch.device("cpu") if _modes() else contextlib.nullcontext()
