"""Dtypes by name, the bytes of tensors, and their classes."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import torch

_NAMED = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}

# Dtypes for which torch lacks most operations: below a byte, and bits without a meaning.
_NO_NUMBERS = re.compile(r"bits\w+|u?int[1-7]|float4\w+|qu?int\w+")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name, or raise ``ValueError``; the inverse of ``dtype_name``."""
    # Why not getattr: torch imports modules in its __getattr__, and a file may give the name.
    dtype = _NAMED.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"{name!r} is not the name of a torch dtype")
    return dtype


def has_numbers(dtype: torch.dtype) -> bool:
    """Return whether torch can fill, compare and read tensors of a dtype."""
    return not _NO_NUMBERS.fullmatch(dtype_name(dtype))


def is_continuous(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds floating-point or complex numbers, which have derivatives."""
    return tensor.is_floating_point() or tensor.is_complex()


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements in order, as a view if possible."""
    flat_tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Why not view(-1): one element is contiguous with any stride, and torch sees bytes at stride 1.
    return flat_tensor.as_strided((flat_tensor.numel(),), (1,)).view(torch.uint8)


def byte_memory(tensor: torch.Tensor) -> Any:
    """Return the memory of a contiguous CPU tensor, which has to outlive it."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def is_dtensor(x: Any) -> bool:
    """Return whether ``x`` is a ``torch.distributed.tensor.DTensor``."""
    # Why by name: importing the class takes longer than importing this library.
    cls = type(x)
    return cls.__name__ == "DTensor" and cls.__module__.startswith("torch.distributed")


def check_plain(tensor: torch.Tensor, title: str) -> None:
    """Raise ``TypeError`` if the class of ``tensor`` changes its operations.

    DTensors are accepted, because their local parts are plain.
    """
    cls = type(tensor)
    if (
        cls in (torch.Tensor, torch.nn.Parameter)
        or getattr(cls, "funcshard_placeholder", False)
        or is_dtensor(tensor)
    ):
        return
    class_name = f"{cls.__module__}.{cls.__qualname__}"
    torch_function = getattr(cls.__torch_function__, "__func__", cls.__torch_function__)
    plain_functions = (
        torch.Tensor.__torch_function__.__func__,  # type: ignore[attr-defined]
        torch.nn.Parameter.__torch_function__,
    )
    is_fake = cls.__module__.startswith("torch._subclasses.")
    if is_fake or (
        cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and torch_function in plain_functions
    ):
        return
    raise TypeError(
        f"{title} is a {cls.__name__} ({class_name}), a tensor class whose operations shards would "
        "lose: they hold plain tensors. Convert it to a plain tensor, or make the tensors that it "
        "consists of your parameters"
    )
