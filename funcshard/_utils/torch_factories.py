"""The device on which torch makes tensors that name none."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


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
    # Why only there: the context costs time for each operation.
    elsewhere = torch.get_default_device().type != "cpu"
    return torch.device("cpu") if elsewhere else contextlib.nullcontext()
