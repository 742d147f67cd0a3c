"""Check the loss function, the scaler and the state of a step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from funcshard.comm import text_of
from funcshard.train.muon_step import MuonStep
from funcshard.train.optimizer_pair import TorchOptimizer
from funcshard.train.optimizers import TorchStep
from funcshard.train.scaler import GradScaler
from funcshard.train.train_state import TrainState


def texts_of_optimizer(optimizer: Any) -> dict[str, str]:
    """Return the settings of an optimizer by name, as texts that ranks can compare."""
    step = optimizer[1] if isinstance(optimizer, tuple) and len(optimizer) == 2 else optimizer
    if isinstance(step, MuonStep):
        own_texts = {
            f"{name} of muon": text_of(value) for name, value in sorted(step.options.items())
        }
        matrices = {f"the optimizer of leaf {path!r}": "muon" for path in sorted(step.owners.of)}
        rest_texts = {
            f"{name}, for other leaves": option_text
            for name, option_text in texts_of_optimizer((None, step.adamw)).items()
        }
        return {"the optimizer": "muon", **own_texts, **matrices, **rest_texts}
    if not isinstance(step, TorchStep):
        return {"the optimizer": text_of(step)}
    texts = {"the optimizer": text_of(step.cls)} | {
        f"{k} of the optimizer": text_of(v) for k, v in step.options[0].items()
    }
    for group_index, options in enumerate(step.options[1:], 1):
        texts |= {
            f"{name} of group {group_index} of the optimizer": text_of(value)
            for name, value in options.items()
        }
    groups = {} if step.layout is None else step.layout.group_of
    return texts | {f"the group of leaf {path!r}": str(groups[path]) for path in sorted(groups)}


def check_scaler(scaler: Any) -> None:
    """Raise ``TypeError`` unless ``scaler`` is a ``GradScaler`` of this library, or ``None``."""
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be a funcshard.GradScaler, or None; found {_misfit(scaler)}")


def _misfit(scaler: Any) -> str:
    """Return what was found in place of a scaler, and what to do."""
    if isinstance(scaler, torch.amp.GradScaler):
        return (
            "torch's GradScaler, which keeps its scale to itself and unscales .grad: pass "
            "scaler=fs.GradScaler(), whose scale is part of the state"
        )
    if scaler is GradScaler:
        return "the class: pass scaler=fs.GradScaler()"
    return f"{type(scaler).__name__}: pass scaler=fs.GradScaler()"


def check_loss_fn(loss_fn: Any) -> None:
    """Raise ``TypeError`` unless ``loss_fn`` takes shards, buffers and batch."""
    rule = "loss_fn must be a function loss_fn(shards, buffers, batch)"
    if isinstance(loss_fn, torch.nn.Module) and next(loss_fn.parameters(), None) is not None:
        raise TypeError(
            f"{rule}; found a module with parameters of its own, {type(loss_fn).__name__}, which "
            "no step would train: call sharded = fs.fully_shard(apply, plan, mesh), and "
            "sharded(shards, buffers, ...) inside loss_fn"
        )
    if not callable(loss_fn):
        remedy = (
            "the optimizer comes after it"
            if isinstance(loss_fn, TorchOptimizer)
            else "pass a function"
        )
        raise TypeError(f"{rule}; found {type(loss_fn).__name__}: {remedy}")
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # a function that does not say what it takes
        return
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        remedy = "write lambda shards, buffers, batch: ..., also if the model has no buffers"
        raise TypeError(f"{rule}; found one of {signature}, {error}: {remedy}") from None


def found_as_state(value: Any) -> str:
    """Return what was found in place of a state, and what to do if it is known."""
    found_type = type(value).__name__
    if isinstance(value, tuple) and value and isinstance(value[0], TrainState):
        return f"{found_type}: write state, metrics = step(state, batch)"
    if isinstance(value, Mapping):
        inner = [name for name, inner_value in value.items() if isinstance(inner_value, TrainState)]
        return (
            f"{found_type}: pass its entry {inner[0]!r}"
            if inner
            else f"{found_type}: make the state with step.init(shards, buffers)"
        )
    return found_type
