"""Adapters of peft around the frozen weights of a planned model."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from funcshard._utils.options import check_choice, check_count, outline
from funcshard.checkpoint import is_hugging_face
from funcshard.plan import Storage, fp8, int8, nf4

# How frozen weights may be stored, by name.
STORAGES = {"nf4": nf4, "int8": int8, "fp8": fp8}
_FORM = '{"r": 16, "targets": ["q_proj", "v_proj"]}'


def check_lora(lora: Any) -> None:
    """Raise unless ``lora`` has a rank, names, and perhaps a storage."""
    if not isinstance(lora, Mapping) or lora.keys() - {"base"} != {"r", "targets"}:
        raise ValueError(
            f"lora must have a rank and names; found {outline(lora)}: pass {_FORM}"
        )
    check_choice("base of lora", lora.get("base", "nf4"), [*STORAGES])
    check_count("r of lora", lora["r"])


def add_adapters(module: nn.Module, lora: Mapping[str, Any]) -> None:
    """Freeze a model's weights, and put trainable adapters of peft around some of them.

    Arguments:
        module: the model, on the meta device.
        lora: that of ``Training``.

    Raises:
        ImportError: peft isn't installed.
        ValueError: no module has such a name.
    """
    rank, names = lora["r"], list(lora["targets"])
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


def storage_of(module: nn.Module, base: str | None) -> dict[str, Storage]:
    """Return ``storage`` of ``make_plan`` for a model's frozen weights.

    As in QLoRA, it packs the frozen matrices of the layers, not those of embedding and head.

    Arguments:
        module: the model, with its adapters if there are any.
        base: name of the storage; ``None``: the weights are stored as they are.
    """
    if base is None:
        return {}
    model: Any = module
    head = model.get_output_embeddings() if is_hugging_face(module) else None
    whole_ids = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, nn.Embedding) or part is head
        for parameter in part.parameters()
    }
    # Note: a glob for the same matrix of all layers.
    globs = {
        re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
        and parameter.ndim > 1
        and id(parameter) not in whole_ids
    }
    return {glob: STORAGES[base]() for glob in sorted(globs)}


@contextlib.contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Let a model's layers leave out their adapters."""
    layers: list[Any] = [part for part in module.modules() if hasattr(part, "base_layer")]
    # Why not peft's enable_adapters: it changes which parameters are trainable.
    for layer in layers:
        vars(layer)["_disable_adapters"] = True
    try:
        yield
    finally:
        for layer in layers:
            vars(layer)["_disable_adapters"] = False
