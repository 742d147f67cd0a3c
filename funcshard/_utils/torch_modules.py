"""What copies of modules need of torch: their classes, and tensors copied when somebody writes."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize


def class_for_calls(module: nn.Module) -> type[nn.Module]:
    """Return the class for copies of ``module``, which many calls make."""
    cls = type(module)
    if "parametrizations" not in module._modules or not parametrize.is_parametrized(module):
        return cls
    # Why a new class: ``parametrize.cached`` keeps tensors under the id of the module that the
    # class was made for, so a call would get those of other calls. This class keeps them on the
    # copies.
    class_namespace = {
        key: value
        for key, value in vars(cls).items()
        if key not in ("__dict__", "__weakref__")
    }
    parametrized_names = [
        name
        for name in module._modules["parametrizations"]._modules  # type: ignore[union-attr]
        if isinstance(class_namespace.get(name), property)
    ]
    return type(
        cls.__name__,
        cls.__bases__,
        class_namespace
        | {
            name: _cached_on_copy(name, class_namespace[name])
            for name in parametrized_names
        },
    )


def forget_parametrized(module: nn.Module) -> None:
    """Drop the tensors that ``parametrize.cached`` keeps for modules below ``module``."""
    if getattr(parametrize, "_cache_enabled", 0):
        for submodule in module.modules():
            submodule.__dict__.pop("_funcshard_cached", None)


def _cached_on_copy(name: str, usual: property) -> property:
    """Return the property of a parametrized tensor, in place of torch's."""

    def get(self: nn.Module) -> torch.Tensor:
        parametrization: Any = self.parametrizations[name]  # type: ignore[index]
        if not getattr(parametrize, "_cache_enabled", 0):
            return parametrization()
        # Note: torch makes another table when the last cached() ends.
        cache_table = getattr(parametrize, "_cache", None)
        cached_table, tensor = parametrization.__dict__.get(
            "_funcshard_cached", (None, None)
        )
        if tensor is None or cached_table is not cache_table:
            tensor = parametrization()
            parametrization.__dict__["_funcshard_cached"] = cache_table, tensor
        return tensor

    return property(get, usual.fset)


# --- copies that are made when somebody writes ----------------------------------------------------

LARGE = 2**14
"""The elements from which on a late copy takes less time than a copy."""

_lock = threading.Lock()


def late_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, outside of transforms and dispatch modes.

    On the CPU both share memory until one of them is written to: torch's copy on write.
    """
    # Why not small ones: observers of quantization resize theirs, and torch then fails to write.
    if (
        tensor.numel() < LARGE
        or tensor.device.type != "cpu"
        or tensor.requires_grad
        or type(tensor) is not torch.Tensor
        or tensor.layout != torch.strided
        or not tensor.is_contiguous()
    ):
        return tensor.clone()
    try:
        with (
            _lock
        ):  # simulated ranks copy the same tensor, and torch changes it for its first copy
            return torch._lazy_clone(tensor)
    except RuntimeError:  # memory of NumPy, of a file, or shared between processes
        return tensor.clone()
