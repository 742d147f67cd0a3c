"""Check the loss function, the scaler and the state of a step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from funcshard._utils.options import outline
from funcshard.comm import text_of
from funcshard.train.matrix_step import PairStep, PerMatrixStep
from funcshard.train.muon_step import MuonStep
from funcshard.train.optimizers import TorchStep
from funcshard.train.scaler import GradScaler
from funcshard.train.train_state import TrainState


def texts_of_optimizer(optimizer: Any) -> dict[str, str]:
    """Return the settings of an optimizer by name, as texts for ranks to compare."""
    _, step = optimizer
    if isinstance(step, PerMatrixStep):
        setting_texts = {"init of per_matrix": text_of(step.init_matrix)}
        setting_texts["update of per_matrix"] = text_of(step.update)
        setting_texts["the tensors that update of per_matrix takes"] = str(step.owners.gathered)
        for path in step.owners.of:
            setting_texts[f"the optimizer of matrix {path!r}"] = "per_matrix"
        for name, text in texts_of_optimizer(step.others or (None, None)).items():
            setting_texts[f"{name}, for other leaves"] = text
        return setting_texts
    if isinstance(step, MuonStep):
        setting_texts = {"the optimizer": "muon"}
        for name, value in sorted(step.options.items()):
            setting_texts[f"{name} of muon"] = text_of(value)
        for path in sorted(step.owners.of):
            setting_texts[f"the optimizer of leaf {path!r}"] = "muon"
        for name, text in texts_of_optimizer((None, step.adamw)).items():
            setting_texts[f"{name}, for other leaves"] = text
        return setting_texts
    if isinstance(step, PairStep):
        step = step.pair[1]
    if not isinstance(step, TorchStep):
        return {"the optimizer": text_of(step)}
    setting_texts = {"the optimizer": text_of(step.cls)}
    for group_index, options in enumerate(step.options):
        where = f" of group {group_index}" if group_index else ""
        for name, value in options.items():
            setting_texts[f"{name}{where} of the optimizer"] = text_of(value)
    if step.layout is not None:
        for path, group in sorted(step.layout.group_of.items()):
            setting_texts[f"the group of leaf {path!r}"] = str(group)
    return setting_texts


def check_scaler(scaler: Any) -> None:
    """Raise ``TypeError`` unless ``scaler`` is a ``GradScaler``, or ``None``."""
    if scaler is None or isinstance(scaler, GradScaler):
        return
    title = outline(scaler)
    if isinstance(scaler, torch.amp.GradScaler):
        title = "torch's GradScaler, which keeps its scale to itself"
    raise TypeError(
        f"scaler must be a funcshard.GradScaler, or None; found {title}: pass "
        "scaler=fs.GradScaler()"
    )


def check_loss_fn(loss_fn: Any) -> None:
    """Raise ``TypeError`` unless ``loss_fn`` takes shards, buffers and batch."""
    rule = "loss_fn must be a function loss_fn(shards, buffers, batch)"
    is_module = isinstance(loss_fn, torch.nn.Module) and any(True for _ in loss_fn.parameters())
    if is_module or not callable(loss_fn):
        raise TypeError(
            f"{rule}; found {outline(loss_fn)}: pass a function that calls the function of "
            "fully_shard and returns the loss, and after it the optimizer"
        )
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # a function that does not say what it takes
        return
    try:
        # What the arguments are does not matter, only how many.
        signature.bind(None, None, None)
    except TypeError as error:
        remedy = "write lambda shards, buffers, batch: ..., also if the model has no buffers"
        raise TypeError(f"{rule}; found one of {signature}, {error}: {remedy}") from None


def found_as_state(value: Any) -> str:
    """Return what was found in place of a state, and what to do."""
    if isinstance(value, tuple) and value and isinstance(value[0], TrainState):
        return "tuple: write state, metrics = step(state, batch)"
    if isinstance(value, Mapping):
        for name, entry in value.items():
            if isinstance(entry, TrainState):
                return f"dict: pass its entry {name!r}"
        return "dict: make the state with step.init(shards, buffers)"
    return outline(value)
