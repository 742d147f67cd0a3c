"""Reads the private attributes that torch gives to modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

__all__ = ["state_names"]

_SAVES = ("state_dict", "_save_to_state_dict", "get_extra_state")


def state_names(
    module: nn.Module, every: Sequence[tuple[str, nn.Module]], classes: Iterable[type[nn.Module]]
) -> tuple[str, ...]:
    """Return the names of the module's state dict, in its order, without making the state dict.

    Arguments:
        module: the module.
        every: path and module of every module of its tree, under all paths, parents first.
        classes: the classes of these modules. If one of them has a state dict of its own kind, or
            a module has a hook, the state dict is made.
    """
    as_usual = all(getattr(cls, name) is getattr(nn.Module, name) for cls in classes for name in _SAVES)
    if not as_usual or any(m._state_dict_hooks or m._state_dict_pre_hooks for _, m in every):
        return tuple(module.state_dict(keep_vars=True))
    found: list[str] = []
    for path, m in every:
        prefix = f"{path}." if path else ""
        found += [prefix + key for key, value in m._parameters.items() if value is not None]
        if m._buffers:
            lost = m._non_persistent_buffers_set
            found += [prefix + key for key, value in m._buffers.items() if value is not None and key not in lost]
    return tuple(found)
