"""Check the loss function and the scaler of a step, and the results of the loss function."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from funcshard.train.scaler import GradScaler

__all__ = ["check_loss_fn", "check_names", "check_scaler", "named_results"]


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


def check_names(new_buffers: Any, buffers: Any) -> None:
    """Raise unless the new buffers are a dictionary with the names of the old ones."""
    if isinstance(buffers, Mapping) and (not isinstance(new_buffers, Mapping) or new_buffers.keys() != buffers.keys()):
        found = sorted(map(str, new_buffers))[:4] if isinstance(new_buffers, Mapping) else type(new_buffers).__name__
        raise TypeError(
            f"with mutable=True loss_fn must return the new buffers, under the names {sorted(buffers)[:4]}; found {found}: "
            f"the order of its results is (loss, weight, new_buffers, aux)"
        )


def named_results(result: Any, has_aux: bool, mutable: bool, weighted: bool) -> dict[str, Any]:
    """Return the results of a loss function by name."""
    names = ["loss", *["weight"] * weighted, *["new_buffers"] * mutable, *["aux"] * has_aux]
    if len(names) == 1 and not isinstance(result, tuple):
        return {"loss": result}
    if not isinstance(result, tuple) or len(result) != len(names):
        wanted = names[0] if len(names) == 1 else f"({', '.join(names)})"
        found = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise TypeError(
            f"with has_aux={has_aux} and mutable={mutable}{' and weighted=True' if weighted else ''} loss_fn must return "
            f"{wanted}; found {found}: for (loss, aux) pass has_aux=True, for (loss, new_buffers) mutable=True, for "
            f"(loss, weight) weighted=True"
        )
    return dict(zip(names, result, strict=True))
