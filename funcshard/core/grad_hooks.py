"""Functions of the user that see gradients on the way: ``on_grads``, ``on_reduce_scattered``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from funcshard.core.flat_buffer import views
from funcshard.core.grad_reducer import OnGrad
from funcshard.plan import BufferPlan

# on_grads(unit, {path: gradient}) -> {path: gradient} of those to replace, or None.
OnGrads = Callable[[str, dict[str, torch.Tensor]], Mapping[str, torch.Tensor] | None]
# on_reduce_scattered(unit, buffer key, sum) -> the tensor to reduce in its place, or None.
OnReduceScattered = Callable[[str, str, torch.Tensor], torch.Tensor | None]


def gradient_hook(on_grads: OnGrads) -> OnGrad:
    """Return the function through which a ``GradReducer`` calls ``on_grads`` before a reduction."""
    if not callable(on_grads):
        raise TypeError(
            "on_grads must be a function of a unit's name and its gradients, or None; found "
            f"{on_grads!r}"
        )
    return functools.partial(_call_on_grads, on_grads)


def scattered_hook(on_reduce_scattered: OnReduceScattered) -> OnGrad:
    """Return the function through which a ``GradReducer`` calls ``on_reduce_scattered``."""
    if not callable(on_reduce_scattered):
        raise TypeError(
            "on_reduce_scattered must be a function of a unit's name, the key of a buffer and a "
            f"1-D tensor, or None; found {on_reduce_scattered!r}"
        )
    return functools.partial(_call_on_reduce_scattered, on_reduce_scattered)


def _call_on_grads(on_grads: OnGrads, unit: str, buffer: BufferPlan, full: torch.Tensor) -> None:
    """Call ``on_grads`` with the leaves' gradients in ``full``; write its replacements there."""
    title = unit or "(root)"
    grads = {leaf.path: view for leaf, view in zip(buffer.leaves, views(full, buffer), strict=True)}
    with torch.no_grad():
        replaced = on_grads(unit, dict(grads))
        if replaced is None:
            return
        if not isinstance(replaced, Mapping) or not replaced.keys() <= grads.keys():
            changed_keys = (
                sorted(replaced.keys() - grads.keys())
                if isinstance(replaced, Mapping)
                else type(replaced).__name__
            )
            raise ValueError(
                f"on_grads must return None, or a dictionary from paths of unit {title!r} to "
                f"gradients; found {changed_keys}, the paths are {list(grads)[:6]}"
            )
        for path, grad in replaced.items():
            if grad is grads[path]:
                continue
            if grad.shape != grads[path].shape:
                raise ValueError(
                    f"on_grads must return gradients of their leaves' shapes; for {path!r} of unit "
                    f"{title!r} found {tuple(grad.shape)} instead of {tuple(grads[path].shape)}"
                )
            grads[path].copy_(grad)


def _call_on_reduce_scattered(
    hook: OnReduceScattered, unit: str, buffer: BufferPlan, partial: torch.Tensor
) -> None:
    """Call ``on_reduce_scattered`` with ``partial``; write the tensor that it returns there."""
    with torch.no_grad():
        replaced = hook(unit, buffer.key, partial)
        if replaced is None or replaced is partial:
            return
        if not isinstance(replaced, torch.Tensor) or replaced.shape != partial.shape:
            changed_form = (
                tuple(replaced.shape)
                if isinstance(replaced, torch.Tensor)
                else type(replaced).__name__
            )
            raise ValueError(
                "on_reduce_scattered must return None, or a tensor of the shape that it got; for "
                f"buffer {buffer.key!r} of unit {unit or '(root)'!r} found {changed_form} instead of "
                f"{tuple(partial.shape)}"
            )
        partial.copy_(replaced)
