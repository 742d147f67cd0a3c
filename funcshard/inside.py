"""Inside a unit's module: its class for a call, and the leaves in their places while its forward runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from funcshard.plan import UnitPlan
from funcshard.precision import on_island
from funcshard.saved import Again, running
from funcshard.skeleton import Skeleton

__all__ = ["Classes", "Places", "in_full_precision", "places_of", "unit_class", "with_leaves", "with_method"]

# a module's class -> a subclass of it that runs through a call's unit
Classes = dict[type[nn.Module], type[nn.Module]]

# where a unit's leaves stand below its module: names of modules to walk -> names in that module's table, leaf numbers
Places = tuple[tuple[tuple[str, ...], tuple[tuple[str, int], ...]], ...]


def places_of(unit: UnitPlan, skeleton: Skeleton) -> Places:
    """Return where the leaves of a unit stand below its module."""
    found: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for number, leaf in enumerate(unit.leaves):
        for place in skeleton.parameters[leaf.path]:
            *modules, name = place[len(unit.name) + 1 if unit.name else 0 :].split(".")
            found.setdefault(tuple(modules), []).append((name, number))
    return tuple((path, tuple(entries)) for path, entries in found.items())


def with_leaves(
    places: Places,
    leaves: list[torch.Tensor],
    module: nn.Module,
    forward: Callable[[Any, Any], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run ``forward`` with ``leaves`` in their places below ``module``, and take them out again."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    saved = running.get() if torch.is_grad_enabled() else None
    try:
        for path, entries in places:
            owner = module
            for name in path:
                owner = owner._modules[name]  # type: ignore[assignment]
            table = owner._parameters
            if saved is not None:
                before.append((owner.__dict__, "_parameters", Again(table, saved, dict(entries))))
                table = owner.__dict__["_parameters"] = dict(table)
            else:
                before += [(table, name, table[name]) for name, _ in entries]
            for name, number in entries:
                table[name] = leaves[number]  # type: ignore[assignment]
            if isinstance(owner, nn.RNNBase):
                before.append((owner.__dict__, "_flat_weights", []))  # where an RNN keeps its weights a second time
        return forward(args, kwargs)
    finally:
        for table, name, value in before:
            table[name] = value


def in_full_precision(module: nn.Module, forward: Callable[[Any, Any], Any], args: Any, kwargs: Any) -> Any:
    """Run a module that owns no parameters in the dtype of its buffers, and of what the units inside it own."""
    own = [t.dtype for t in (*module.parameters(), *module.buffers(recurse=False)) if t.is_floating_point()]
    return on_island(max(own, key=lambda dtype: dtype.itemsize, default=torch.float32), forward, (args, kwargs), {})


def unit_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``cls`` whose forward is the call's run of the unit around the forward of ``cls``."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__
        own = state.get("_funcshard_forward") or functools.partial(state.get("_funcshard_compiled") or cls.forward, self)
        return state["_funcshard_run"](self, lambda args, kwargs: own(*args, **kwargs), args, kwargs)

    return with_method(cls, "forward", forward)


def with_method(cls: type[nn.Module], name: str, method: Callable[..., Any]) -> type[nn.Module]:
    """A subclass of ``cls`` with another method under ``name``."""
    return type(cls.__name__, (cls,), {name: method, "__module__": cls.__module__, "__qualname__": cls.__qualname__})
