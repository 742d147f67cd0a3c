"""Adapters of peft around the frozen weights of a planned model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from funcshard._utils.options import check_count, outline

_FORM = '{"r": 16, "targets": ["q_proj", "v_proj"]}'


def add_adapters(module: nn.Module, lora: Mapping[str, Any]) -> None:
    """Freeze a model's weights, and put trainable adapters of peft around some of them.

    Arguments:
        module: the model, on the meta device.
        lora: ``r`` and ``targets``, as in ``plan_run``.

    Raises:
        ImportError: peft isn't installed.
        ValueError: the options are others, or no module has such a name.
    """
    if not isinstance(lora, Mapping) or lora.keys() != {"r", "targets"}:
        raise ValueError(f"lora must have a rank and names; found {outline(lora)}: pass {_FORM}")
    rank, names = check_count("r of lora", lora["r"]), list(lora["targets"])
    try:
        import peft
    except ImportError as error:
        raise ImportError("lora needs peft: pip install peft") from error
    try:
        with torch.device("meta"):
            options = peft.LoraConfig(r=rank, target_modules=names)
            peft.inject_adapter_in_model(options, module)
    except ValueError as error:
        linear_names = {
            path.rpartition(".")[2]
            for path, part in module.named_modules()
            if isinstance(part, nn.Linear)
        }
        raise ValueError(
            f"targets of lora must be names of linear modules; found {names}: pass some of "
            f"{', '.join(sorted(linear_names))}"
        ) from error
