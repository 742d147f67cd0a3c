"""Losses as plain operations, which have derivatives of any order.

The kernels of ``torch.nn.functional`` for these losses have no derivative of their gradient in
forward mode, so a product with a Hessian, which is forward over reverse, fails in them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional


def _plain(kernel: Any, elementwise: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the loss of ``kernel``, computed by ``elementwise(inputs, targets, **options)``."""
    signature = inspect.signature(kernel)

    def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound_values = signature.bind(*args, **kwargs).arguments
        values = {name: value for name, value in bound_values.items() if value is not None}
        inputs, targets = values.pop("input"), values.pop("target")
        reduction = values.pop("reduction", "mean")
        # Why the kernel: it warns of other shapes, and knows torch's deprecated arguments.
        is_plain = inputs.shape == targets.shape and values.keys() <= {"delta"}
        if not is_plain or reduction not in ("none", "mean", "sum"):
            result: torch.Tensor = kernel(*args, **kwargs)
            return result
        losses = elementwise(inputs, targets, **values)
        if reduction == "none":
            return losses
        return losses.mean() if reduction == "mean" else losses.sum()

    return loss


def _squares(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (inputs - targets).square()


def _huber(inputs: torch.Tensor, targets: torch.Tensor, delta: float = 1.0) -> torch.Tensor:
    distance = (inputs - targets).abs()
    return torch.where(distance <= delta, 0.5 * distance.square(), delta * (distance - 0.5 * delta))


def _soft_margin(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.softplus(-targets * inputs)


PLAIN_LOSSES: dict[Any, Callable[..., torch.Tensor]] = {
    functional.mse_loss: _plain(functional.mse_loss, _squares),
    functional.huber_loss: _plain(functional.huber_loss, _huber),
    functional.soft_margin_loss: _plain(functional.soft_margin_loss, _soft_margin),
}
