"""The digest of a value that a module keeps: two values of other digests differ.

Values may be objects of users, which may raise, or lie about their length, or compare to arrays. So
``digest`` looks at the values of plain types and at the attributes of objects, and calls none of
their methods.
"""

from __future__ import annotations

import hashlib
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from funcshard._utils import byte_view

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, range, slice})
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_MOST = 10_000  # objects inside one value
_WHOLE = 2**16  # bytes of a tensor that are read one by one


class _Unknown(Exception):  # noqa: N818
    """A value that has no digest."""


def digest(value: Any) -> bytes | None:
    """Return the digest of a value, or ``None`` if it has none.

    Functions have none, and neither have values that refer to modules or parameters: copies of
    them differ in each call.
    """
    state = hashlib.blake2b(digest_size=16)
    try:
        _feed(value, state.update, {})
    except Exception:  # whatever a user's object raises
        return None
    return state.digest()


def _feed(value: Any, update: Callable[[bytes], None], seen: dict[int, Any]) -> None:
    kind = type(value)
    if kind in _PLAIN or isinstance(value, _OF_TORCH):
        update(f"{kind.__name__} {value!r};".encode())
        return
    if (
        isinstance(value, (nn.Module, nn.Parameter, types.FunctionType, types.MethodType))
        or len(seen) > _MOST
    ):
        raise _Unknown
    update(f"{kind.__module__}.{kind.__qualname__}:".encode())
    if id(value) in seen:
        update(b"again;")
        return
    seen[id(value)] = value  # which keeps the number from another object
    if isinstance(value, type):
        update(f"{value.__module__}.{value.__qualname__};".encode())
    elif isinstance(value, torch.Tensor):
        _feed_tensor(value, update)
    elif isinstance(value, torch.Generator):
        _feed_tensor(value.get_state(), update)
    elif isinstance(value, (list, tuple, deque)):
        base = next(base for base in (list, tuple, deque) if isinstance(value, base))
        for item in base.__iter__(value):  # type: ignore[arg-type]
            _feed(item, update, seen)
    elif isinstance(value, dict):
        _feed([*dict.items(value)], update, seen)
    elif isinstance(value, (set, frozenset)):
        update(repr(sorted([digest(item) or b"" for item in value])).encode())
    else:
        _feed(object.__getattribute__(value, "__dict__"), update, seen)
    update(b";")


def _feed_tensor(value: torch.Tensor, update: Callable[[bytes], None]) -> None:
    update(f"{value.dtype} {tuple(value.shape)} {value.device} ".encode())
    if value.is_meta or value.layout != torch.strided or type(value) is not torch.Tensor:
        return
    data = byte_view(value.detach())
    if data.numel() > _WHOLE:
        update(f"{int(data.sum())} {int(data[::2].sum())}".encode())
        data = data[:: data.numel() // _WHOLE]
    update(bytes(data.tolist()))
