"""Follow what a Python object leads to: through closures, defaults, partials, containers and weak references."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["captured", "reachable"]


def reachable(value: Any) -> Iterator[Any]:
    """Yield ``value`` and everything that it leads to, without going into modules, tensors and classes.

    Functions lead to what they close over and to their defaults, weak references to their object, and other objects to
    all that they refer to.
    """
    return _walk(value, everything=True)


def captured(function: Any) -> Iterator[Any]:
    """Yield ``function`` and what it captured: through closures, defaults, partials, tuples, lists and dictionaries."""
    return _walk(function, everything=False)


def _walk(value: Any, *, everything: bool) -> Iterator[Any]:
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        if isinstance(found, (torch.nn.Module, torch.Tensor, type, types.ModuleType)):
            continue
        if isinstance(found, types.FunctionType):
            waiting += [each for cell in found.__closure__ or () for each in gc.get_referents(cell)]
            waiting += [found.__defaults__, found.__kwdefaults__]
        elif isinstance(found, functools.partial):
            waiting += [found.func, found.args, found.keywords]
        elif isinstance(found, (tuple, list)):
            waiting += found
        elif isinstance(found, dict):
            waiting += [*found, *found.values()] if everything else found.values()
        elif everything:
            waiting += [found()] if isinstance(found, weakref.ref) else gc.get_referents(found)
