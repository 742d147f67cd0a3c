"""Dtypes by name; and find, map and cast the tensors in any Python structure.

Inputs and outputs of modules aren't always pytrees: these functions look into tuples, named tuples,
lists, mappings, dataclasses and packed sequences, if they can be read.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import operator
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

_NAMED = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

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


def cast_tree(x: Any, dtype: torch.dtype) -> Any:
    """Return ``x`` with floating-point tensors cast to ``dtype``, differentiably."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, x)


def map_tensors(f: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    """Return ``x`` with each tensor replaced by ``f(tensor)``.

    A container in which ``f`` changes nothing stays the same object, so that a list which a module
    appends to stays the caller's.
    """
    if isinstance(x, torch.Tensor):
        return f(x)
    if isinstance(x, torch.nn.utils.rnn.PackedSequence):
        mapped_data = f(x.data)
        if mapped_data is x.data:
            return x
        return type(x)(mapped_data, x.batch_sizes, x.sorted_indices, x.unsorted_indices)
    if _is_dataclass(x) or isinstance(x, MutableMapping):
        changed_items = _changed(f, _items(x))
        if not changed_items:
            return x
        if _is_dataclass(x):
            return dataclasses.replace(x, **changed_items)
        x = copy.copy(x)
        x.update(changed_items)
        return x
    if isinstance(x, (list, tuple)):
        old_items = _elements(x)
        mapped_items = [map_tensors(f, item) for item in old_items]
        # By identity: equality of tensors is a tensor.
        if all(map(operator.is_, mapped_items, old_items)):
            return x
        return type(x)(*mapped_items) if hasattr(x, "_fields") else type(x)(mapped_items)
    return x


def tensors_in(x: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``x``, in the order of ``map_tensors``, also of read-only mappings."""
    if isinstance(x, torch.Tensor):
        yield x
        return
    parts: Sequence[Any] = ()
    if isinstance(x, (list, tuple)):
        parts = _elements(x)
        if isinstance(x, torch.nn.utils.rnn.PackedSequence):
            parts = parts[:1]  # its other tensors count the data
    elif isinstance(x, Mapping) or _is_dataclass(x):
        parts = [item for _, item in _items(x)]
    for part in parts:
        # Why first: most parts are numbers. No set of classes, as a class may have no hash.
        if not isinstance(part, (int, float, str, torch.dtype)) and part is not None:
            yield from tensors_in(part)


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


def _changed(
    f: Callable[[torch.Tensor], torch.Tensor], items: list[tuple[Any, Any]]
) -> dict[Any, Any]:
    mapped_items = [(key, value, map_tensors(f, value)) for key, value in items]
    return {
        key: mapped_value for key, value, mapped_value in mapped_items if mapped_value is not value
    }


def _elements(x: list[Any] | tuple[Any, ...]) -> list[Any]:
    """Return the elements of a list or tuple, whatever its class says."""
    return list(list.__iter__(x) if isinstance(x, list) else tuple.__iter__(x))


def _items(x: Any) -> list[tuple[Any, Any]]:
    """Return the items of a mapping, or the fields of a dataclass, if it can be read."""
    try:
        if _is_dataclass(x):
            return [
                (field.name, getattr(x, field.name))
                for field in dataclasses.fields(x)
                if field.init
            ]
        return list(x.items())
    except Exception:  # of any kind: it is the code of any class
        return []


def _is_dataclass(x: Any) -> bool:
    return dataclasses.is_dataclass(x) and not isinstance(x, (type, torch.nn.Module))
