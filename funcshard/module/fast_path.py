"""Keep a ``TransformerEncoderLayer`` off its fast path, which would read placeholders.

In evaluation mode the forward of ``nn.TransformerEncoderLayer`` does not call its modules: it hands
all their parameters to one function. If one of these modules is a unit, its parameters are
placeholders there. torch takes the usual path if a module of the layer has a hook.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from funcshard._utils import tree
from funcshard.module.skeleton import Skeleton


def _return_nothing(module: nn.Module, args: Any, result: Any) -> None:
    """Do nothing, as a hook of a module."""


def leave_fast_path(module: nn.Module) -> None:
    """Give a call's module a hook, without which it might take its fast path."""
    # Why -1: torch counts the hooks of users from 0.
    module.__dict__["_forward_hooks"][-1] = _return_nothing


def without_fast_path(skeleton: Skeleton, units: Iterable[str]) -> tuple[int, ...]:
    """Return the indices of the layers that contain a unit and have no forward hooks themselves.

    Arguments:
        skeleton: the model.
        units: the paths of the units' modules.
    """
    layers = [
        index
        for index, spec in enumerate(skeleton.specs)
        if issubclass(spec.cls, nn.TransformerEncoderLayer)
    ]
    paths = {index: path for path, index in skeleton.paths().items()} if layers else {}
    return tuple(
        index
        for index in layers
        if any(name != paths[index] and tree.is_under(name, paths[index]) for name in units)
        and "_forward_hooks" not in skeleton.specs[index].attributes
    )
