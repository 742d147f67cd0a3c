"""Parameters that are no part of the plan: calls of ``fully_shard`` take them among buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from funcshard.plan import Plan

Shapes = Mapping[str, tuple[int, ...]]


def check_ignored(ignored: Shapes, plan: Plan) -> None:
    """Raise ``ValueError`` if an ignored parameter is a leaf of ``plan``."""
    planned = {path for leaf in plan.leaves for path in (leaf.path, *leaf.aliases)}
    both = next((name for name in ignored if name in planned), None)
    if both is not None:
        raise ValueError(
            f"ignored_params match {both!r}, which is a leaf of the plan; make the plan from the "
            "params without those that are ignored, or do not ignore it"
        )


def take_ignored(
    ignored: Shapes, buffers: Any, params: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return ``params`` with the ignored ones among ``buffers``, and the buffers without them.

    Raises:
        ValueError: an ignored parameter is missing, or has another shape than in the module.
        TypeError: ``buffers`` is not a dictionary.
    """
    if not isinstance(buffers, Mapping):
        raise TypeError(
            f"buffers must be a dictionary {{name: tensor}}; found {type(buffers).__name__}"
        )
    for name, shape in ignored.items():
        tensor = buffers.get(name)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape:
            kind = "nothing" if tensor is None else type(tensor).__name__
            if isinstance(tensor, torch.Tensor):
                kind = str(tuple(tensor.shape))
            raise ValueError(
                f"buffers must hold a tensor of shape {tuple(shape)} for {name!r}, which is in "
                f"ignored_params; found {kind}: pass {{**buffers, **own}}, where own has the "
                "ignored parameters by name"
            )
    ignored_params = {name: buffers[name] for name in ignored}
    planned_buffers = {name: value for name, value in buffers.items() if name not in ignored}
    return {**params, **ignored_params}, planned_buffers
