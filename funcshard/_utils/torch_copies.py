"""Copies of large tensors whose memory is copied when somebody writes to it, and not before."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from funcshard._utils.torch_names import private

LARGE = 2**14
"""The elements from which on a late copy takes less time than a copy."""

_lazy_clone: Callable[[torch.Tensor], torch.Tensor] | None = private(
    "torch._lazy_clone", "fast copies of buffers", None
)
_lock = threading.Lock()


def late_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, for which no transform and no dispatch mode is active.

    The copy and the tensor share memory until one of them is written to: torch's copy on write,
    which no operation can miss. Tensors outside the CPU are copied, as are those whose memory torch
    did not allocate.
    """
    if (
        _lazy_clone is None
        or tensor.device.type != "cpu"
        or tensor.requires_grad
        or type(tensor) is not torch.Tensor
        or tensor.layout != torch.strided
        or not tensor.is_contiguous()
    ):
        return tensor.clone()
    try:
        with _lock:  # simulated ranks copy the same tensor, and torch changes it for its first copy
            return _lazy_clone(tensor)
    except RuntimeError:  # memory of NumPy, of a file, or shared between processes
        return tensor.clone()
