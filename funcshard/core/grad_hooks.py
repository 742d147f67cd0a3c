"""Functions of the user that see gradients on the way: ``on_grads``, ``on_reduce_scattered``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from funcshard.core.flat_buffer import views
from funcshard.core.grad_reducer import OnGrad
from funcshard.plan import BufferPlan

# on_grads(unit, {path: gradient}) -> {path: gradient} of those to replace, or None.
OnGrads = Callable[[str, dict[str, torch.Tensor]], Mapping[str, torch.Tensor] | None]
# on_reduce_scattered(unit, buffer key, sum) -> the tensor to reduce in its place, or None.
OnReduceScattered = Callable[[str, str, torch.Tensor], torch.Tensor | None]


def gradient_hook(on_grads: OnGrads) -> OnGrad:
    """Return the function through which a ``GradReducer`` calls ``on_grads`` before a reduction.

    It calls ``on_grads`` with the gradients of the leaves, and writes its replacements to the flat
    gradient.
    """
    _check_hook("on_grads", on_grads, "a unit's name and its gradients")

    @torch.no_grad()
    def call(unit: str, buffer: BufferPlan, full: torch.Tensor) -> None:
        paths = [leaf.path for leaf in buffer.leaves]
        grads = dict(zip(paths, views(full, buffer), strict=True))
        replaced = on_grads(unit, dict(grads))
        if replaced is None:
            return
        title = unit or "(root)"
        if not isinstance(replaced, Mapping) or not replaced.keys() <= grads.keys():
            result_text: Any = type(replaced).__name__
            if isinstance(replaced, Mapping):
                result_text = sorted(replaced.keys() - grads.keys())
            raise ValueError(
                f"on_grads must return None, or a dictionary from paths of unit {title!r} to "
                f"gradients; found {result_text}, the paths are {paths[:6]}"
            )
        for path, grad in replaced.items():
            if grad.shape != grads[path].shape:
                raise ValueError(
                    f"on_grads must return gradients of their leaves' shapes; for {path!r} of unit "
                    f"{title!r} found {tuple(grad.shape)} instead of {tuple(grads[path].shape)}"
                )
            if grad is not grads[path]:
                grads[path].copy_(grad)

    return call


def scattered_hook(on_reduce_scattered: OnReduceScattered) -> OnGrad:
    """Return the function through which a ``GradReducer`` calls ``on_reduce_scattered``.

    It writes the tensor that ``on_reduce_scattered`` returns to the partial sum.
    """
    takes = "a unit's name, the key of a buffer and a 1-D tensor"
    _check_hook("on_reduce_scattered", on_reduce_scattered, takes)

    @torch.no_grad()
    def call(unit: str, buffer: BufferPlan, partial: torch.Tensor) -> None:
        replaced = on_reduce_scattered(unit, buffer.key, partial)
        if replaced is None or replaced is partial:
            return
        if not isinstance(replaced, torch.Tensor) or replaced.shape != partial.shape:
            result_form: Any = type(replaced).__name__
            if isinstance(replaced, torch.Tensor):
                result_form = tuple(replaced.shape)
            raise ValueError(
                "on_reduce_scattered must return None, or a tensor of the shape that it got; for "
                f"buffer {buffer.key!r} of unit {unit or '(root)'!r} found {result_form} instead of "
                f"{tuple(partial.shape)}"
            )
        partial.copy_(replaced)

    return call


def _check_hook(name: str, hook: Any, takes: str) -> None:
    if not callable(hook):
        raise TypeError(f"{name} must be a function of {takes}, or None; found {hook!r}")
