"""What a module keeps besides its tensors and children: what calls may share, and what each call needs its own copy of."""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
import pathlib
import re
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["is_immutable", "reachable"]

_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type, enum.Enum, pathlib.PurePath, re.Pattern),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def is_immutable(value: Any) -> bool:
    """Whether no call can change ``value``, so that all of them may share it."""
    if isinstance(value, (tuple, frozenset)):
        return all(is_immutable(each) for each in value)
    if dataclasses.is_dataclass(value) and type(value).__dataclass_params__.frozen:  # type: ignore[union-attr]
        return all(is_immutable(getattr(value, field.name)) for field in dataclasses.fields(value))
    return isinstance(value, _ATOMS)


def reachable(value: Any) -> Iterator[Any]:
    """Walk over ``value`` and what it leads to, without going into modules, tensors and classes.

    Functions lead to what they close over and to their defaults, weak references to what they refer to.
    """
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        if isinstance(found, (nn.Module, torch.Tensor, type, types.ModuleType)):
            continue
        if isinstance(found, types.FunctionType):
            waiting += [each for cell in found.__closure__ or () for each in gc.get_referents(cell)]
            waiting += [found.__defaults__, found.__kwdefaults__]
        elif isinstance(found, weakref.ref):
            waiting.append(found())
        elif isinstance(found, functools.partial):
            waiting += [found.func, found.args, found.keywords]
        else:
            waiting += gc.get_referents(found)
