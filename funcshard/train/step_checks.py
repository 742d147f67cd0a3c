"""Check the loss function and the scaler of a step."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from funcshard.train.scaler import GradScaler

__all__ = ["check_loss_fn", "check_scaler"]


def check_scaler(scaler: Any) -> None:
    """Raise ``TypeError`` unless ``scaler`` is a ``GradScaler`` of this library, or ``None``."""
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be a funcshard.GradScaler, or None; found {_misfit(scaler)}")


def _misfit(scaler: Any) -> str:
    """Return what was found in place of a scaler, and the remedy."""
    if isinstance(scaler, torch.amp.GradScaler):
        return (
            "torch's GradScaler, which keeps its scale to itself and unscales .grad: pass scaler=fs.GradScaler(), whose "
            "scale is part of the state"
        )
    if scaler is GradScaler:
        return "the class: pass scaler=fs.GradScaler()"
    return f"{type(scaler).__name__}: pass scaler=fs.GradScaler()"


def check_loss_fn(loss_fn: Any) -> None:
    """Raise ``TypeError`` unless ``loss_fn`` takes shards, buffers and batch."""
    rule = "loss_fn must be a function loss_fn(shards, buffers, batch)"
    if isinstance(loss_fn, torch.nn.Module) and next(loss_fn.parameters(), None) is not None:
        raise TypeError(
            f"{rule}; found a module with parameters of its own, {type(loss_fn).__name__}, which no step would train: call "
            f"sharded = fs.fully_shard(apply, plan, mesh), and sharded(shards, buffers, ...) inside loss_fn"
        )
    if not callable(loss_fn):
        raise TypeError(f"{rule}; found {type(loss_fn).__name__}: pass a function")
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # a function that does not say what it takes
        return
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        remedy = "write lambda shards, buffers, batch: ..., also if the model has no buffers"
        raise TypeError(f"{rule}; found one of {signature}, {error}: {remedy}") from None
