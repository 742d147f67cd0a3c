"""Kernels of torch that have no public name."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch


def unscale_in_place(
    tensors: Sequence[torch.Tensor], factors: Mapping[torch.device, torch.Tensor]
) -> dict[torch.device, torch.Tensor]:
    """Multiply tensors by a factor in place, and look for infinities and NaN, in one pass.

    Arguments:
        tensors: dense tensors of float32 or wider, without an autograd graph.
        factors: the factor, a float32 scalar, on each device of the tensors.

    Returns:
        For each device a float32 scalar: 1 if a tensor there had an infinity or NaN, else 0.

    Source: ``torch.amp.GradScaler.unscale_`` calls the same kernel.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        # The kernel takes real numbers of one dtype and device.
        real_tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        by_kind.setdefault((real_tensor.device, real_tensor.dtype), []).append(real_tensor)
    found_infs = {
        device: torch.zeros(1, device=device, dtype=torch.float32) for device, _ in by_kind
    }
    for (device, _), same_kind in by_kind.items():
        torch._amp_foreach_non_finite_check_and_unscale_(
            same_kind, found_infs[device], factors[device].reshape(1)
        )
    return {device: found_inf.squeeze() for device, found_inf in found_infs.items()}


# --- copies that are made when somebody writes ----------------------------------------------------

LARGE = 2**14
"""The elements from which on a late copy takes less time than a copy."""

_lock = threading.Lock()


def late_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, outside of transforms and dispatch modes.

    On the CPU both share memory until one of them is written to: torch's copy on write.
    """
    if (
        tensor.device.type != "cpu"
        or tensor.requires_grad
        or type(tensor) is not torch.Tensor
        or tensor.layout != torch.strided
        or not tensor.is_contiguous()
    ):
        return tensor.clone()
    try:
        with _lock:  # simulated ranks copy the same tensor, and torch changes it for its first copy
            return torch._lazy_clone(tensor)
    except RuntimeError:  # memory of NumPy, of a file, or shared between processes
        return tensor.clone()
