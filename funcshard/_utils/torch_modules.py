"""Reads the private attributes that torch gives to modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

_SAVES = ("state_dict", "_save_to_state_dict", "get_extra_state")


def state_names(
    module: nn.Module, every: Sequence[tuple[str, nn.Module]], classes: Iterable[type[nn.Module]]
) -> tuple[str, ...]:
    """Return the names of a module's state dict in order, mostly without making it.

    Arguments:
        every: path and module of its tree, under all paths, parents first.
    """
    try:
        usual_names = _state_names(every, classes)
    except AttributeError:  # this torch has other names
        usual_names = None
    # Note: a hook, or a class with its own kind of state dict, may change the names.
    if usual_names is None:
        return tuple(module.state_dict(keep_vars=True))
    return tuple(usual_names)


def _state_names(
    every: Sequence[tuple[str, nn.Module]], classes: Iterable[type[nn.Module]]
) -> list[str] | None:
    as_usual = all(
        getattr(cls, name) is getattr(nn.Module, name) for cls in classes for name in _SAVES
    )
    # A hook may add, rename or drop entries.
    if not as_usual or any(m._state_dict_hooks or m._state_dict_pre_hooks for _, m in every):
        return None
    state_keys: list[str] = []
    for path, m in every:
        prefix = f"{path}." if path else ""
        state_keys += [prefix + key for key, value in m._parameters.items() if value is not None]
        if m._buffers:
            non_persistent = m._non_persistent_buffers_set
            state_keys += [
                prefix + key
                for key, value in m._buffers.items()
                if value is not None and key not in non_persistent
            ]
    return state_keys


def class_for_calls(module: nn.Module) -> type[nn.Module]:
    """Return the class for copies of ``module``, which many calls make."""
    cls = type(module)
    if "parametrizations" not in module._modules or not parametrize.is_parametrized(module):
        return cls
    # Why a new class: ``parametrize.cached`` keeps tensors under the id of the module that the
    # class was made for, so a call would get those of other calls. This class keeps them on the
    # copies.
    class_namespace = {
        key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")
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
        | {name: _cached_on_copy(name, class_namespace[name]) for name in parametrized_names},
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
        cached_table, tensor = parametrization.__dict__.get("_funcshard_cached", (None, None))
        if tensor is None or cached_table is not cache_table:
            tensor = parametrization()
            parametrization.__dict__["_funcshard_cached"] = cache_table, tensor
        return tensor

    return property(get, usual.fset)
