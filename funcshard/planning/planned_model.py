"""``PlannedModel``: a model as a run uses it, with adapters, a reference, or cut layers."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from funcshard.checkpoint import default_units, module_of_config
from funcshard.estimate import Hardware, Space
from funcshard.plan import MixedPrecision, Storage
from funcshard.planning.adapters import add_adapters, storage_of
from funcshard.planning.model_inputs import (
    InputMaker,
    context_of,
    has_vision,
    takes_text_alone,
    text_config,
)
from funcshard.planning.task_models import CachedModel, Preferences, pairs, prompts
from funcshard.planning.tasks import PRECISIONS, Generation, Training
from funcshard.planning.tensor_parts import AXIS, cut_along_tensor

_NO_DROPS = "The plan runs every layer: it leaves the config's layerdrop out."
_SCAN = "mamba_selective_scan"  # the function of transformers that calls a kernel or loops
_CHUNK = 2048  # tokens between two states that the kernel keeps
_SCANS = "Scans take what the kernels of mamba_ssm do; without it, transformers loops over tokens."
_DECODING = "Layers decode their packed weights in each pass, which takes no time here."


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model as a run uses it.

    Attributes:
        module: the model, with its adapters and one rank's part of each layer.
        traced: the module that a step calls: the model, or one around it.
        path: its ``config.json``, or the folder; ``None`` for a module of yours.
        parameters: number of parameters of the whole model.
        units: the modules of ``traced`` that are units.
        local: as in ``make_plan``.
        storage: as in ``make_plan``.
        inputs: as in ``Training``.
        precision: as in ``profile``.
        drops_layers: whether the config would drop layers at random.
        has_scans: whether layers scan as mamba_ssm does.
    """

    module: nn.Module
    traced: nn.Module
    path: str | None
    parameters: int
    units: Sequence[str]
    local: Mapping[str, Mapping[str, int]]
    storage: Mapping[str, Storage]
    inputs: InputMaker | None
    precision: MixedPrecision | None
    drops_layers: bool
    has_scans: bool

    def space(self, space: Space | None = None) -> Space:
        """Return a space of plans of this model."""
        return replace(space or Space(), local=self.local, storage=self.storage)


def planned_model(
    model: nn.Module | str | os.PathLike[str], task: Training | Generation, tensor: int
) -> PlannedModel:
    """Return a model as a run uses it.

    Arguments:
        model: that of ``plan_run``.
        task: what the run does.
        tensor: number of ranks that divide each layer.
    """
    path = None if isinstance(model, nn.Module) else os.fspath(model)
    module = model if isinstance(model, nn.Module) else module_of_config(Path(model))
    drops_layers = path is not None and _without_layerdrop(module)
    has_scans = path is not None and _fuse_scans(module)
    if path is not None and isinstance(task, Training):
        _without_cache(module)
    lora = task.lora if isinstance(task, Training) else None
    dpo = isinstance(task, Training) and task.dpo
    generates = isinstance(task, Generation)
    is_decoder = "CausalLM" in type(module).__name__
    if not is_decoder and (generates or dpo):
        raise ValueError(
            f"{'generation' if generates else 'dpo'} needs a decoder of transformers; found "
            f"{type(module).__name__}: pass such a model, or another task"
        )
    if task.base is not None and tensor > 1:
        raise ValueError(
            f"weights stored as {task.base} can't be cut along {AXIS}, because blocks would cross the "
            f"cuts; found {tensor} ranks along it: leave out the axis, or the storage"
        )
    if isinstance(model, nn.Module) and (task.dtype or lora or generates or tensor > 1):
        module = copy.deepcopy(module)
    if task.dtype is not None:
        module = module.to(task.dtype)
    if generates:
        module.requires_grad_(False).eval()
    if lora is not None:
        add_adapters(module, lora)
    parameters = sum(param.numel() for param in module.parameters())
    units, storage = default_units(module, ends=True), storage_of(module, task.base)
    local = cut_along_tensor(module, tensor) if tensor > 1 else {}
    traced, parts = module, [""]
    inputs: InputMaker | None
    if isinstance(task, Generation):
        traced, parts, inputs = CachedModel(module), ["model."], prompts
    elif task.dpo:
        dtype = None if task.precision == "fp32" else torch.bfloat16
        traced, inputs = Preferences(module, dtype, adapters=lora is not None), pairs
        parts = ["policy.", "reference."] if lora is None else ["policy."]
    else:
        inputs = task.inputs
    return PlannedModel(
        module=module,
        traced=traced,
        path=path,
        parameters=parameters,
        units=[f"{part}{name}" for part in parts for name in units],
        local={f"{part}{name}": cut for part in parts for name, cut in local.items()},
        storage={
            f"{part}{glob}": packing for part in parts for glob, packing in storage.items()
        },
        inputs=inputs,
        precision=None if generates else PRECISIONS[task.precision],
        drops_layers=drops_layers,
        has_scans=has_scans,
    )


def _without_layerdrop(module: nn.Module) -> bool:
    """Set all layerdrop to 0, and return whether there was any."""
    # Why: a layer that may be dropped reads a random value, which a trace doesn't have.
    drops_layers = False
    for submodule in module.modules():
        for owner in (submodule, getattr(submodule, "config", None)):
            for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
                if getattr(owner, name, 0.0):
                    setattr(owner, name, 0.0)
                    drops_layers = True
    return drops_layers


def _without_cache(module: nn.Module) -> None:
    # Why: the forward of some models, such as LLaVA, has no use_cache.
    for submodule in module.modules():
        config: Any = getattr(submodule, "config", None)
        # Note: a mask of sounds would be drawn from values, which a trace doesn't have.
        for name in ("use_cache", "apply_spec_augment"):
            if getattr(config, name, False):
                setattr(config, name, False)


def doubts_of(model: PlannedModel, hardware: Hardware) -> Iterator[str]:
    """Yield what model and hardware have that the runs didn't to which times were fitted."""
    module = model.module
    config: Any = getattr(module, "config", None)
    if hardware.sources["flops_efficiency"].how == "extrapolated":
        yield "another GPU"
    if "CausalLM" not in type(module).__name__ and "LMHead" not in type(module).__name__:
        yield "no decoder" if config is not None else "a model of yours"
    if getattr(text_config(config), "num_experts_per_tok", None):
        yield "experts"
    if _has_eager_attention(config):
        yield "eager attention"


def notes_of(
    model: PlannedModel, task: Training | Generation, seq: int, hardware: Hardware
) -> Iterator[str]:
    """Yield what you should know about the model and the hardware."""
    yield hardware.about
    module, precision = model.module, task.precision
    config: Any = getattr(module, "config", None)
    dtype = getattr(config, "dtype", None)
    kept = {"bf16": "float32 parameters and computes in bfloat16", "fp32": "all in float32"}
    frozen = not all(param.requires_grad for param in module.parameters())
    if dtype not in (None, torch.float32) and precision in kept and not frozen:
        yield (
            f"The config says {str(dtype).removeprefix('torch.')}, which is the dtype of its files. "
            f"The plan keeps {kept[precision]}; precision bf16-params keeps all in bfloat16."
        )
    if getattr(config, "quantization_config", None):
        yield "The config quantizes its files; the plan trains weights that aren't quantized."
    if _has_eager_attention(config):
        yield (
            "Attention is eager, as transformers has no call of SDPA for this model, so each head "
            "keeps a matrix of tokens × tokens."
        )
    main_input = getattr(module, "main_input_name", "")
    if has_vision(config) and takes_text_alone(config) and main_input != "pixel_values":
        yield "The batch has tokens only: pass Training(inputs=...) for images too."
    context = context_of(module)
    if context is not None and seq > context:
        yield f"{seq:,} tokens are more than the {context:,} positions of the config."
    if model.drops_layers:
        yield _NO_DROPS
    if model.has_scans:
        yield _SCANS
    if model.storage:
        yield _DECODING


def _has_eager_attention(config: Any) -> bool:
    # Why heads: transformers says eager of models without attention too, such as ConvNeXt.
    return (
        getattr(config, "_attn_implementation", None) == "eager"
        and getattr(config, "num_attention_heads", None) is not None
    )


# --- scans of state space models ------------------------------------------------------------------


# Why: without the kernels of mamba_ssm, transformers loops over tokens, which no run does.
def _fuse_scans(module: nn.Module) -> bool:
    has_scans = False
    for submodule in module.modules():
        layer_class: Any = type(submodule)
        if _SCAN in _plain_forward(layer_class).__code__.co_names:
            submodule.__class__ = _fused(layer_class)
            has_scans = True
    return has_scans


def _plain_forward(cls: Any) -> Any:
    return inspect.unwrap(cls.forward)  # without the decorators of transformers


@functools.cache
def _fused(cls: Any) -> type[nn.Module]:
    forward = _plain_forward(cls)
    # Why a copy: the function is a global of transformers, which others use.
    fused_forward = types.FunctionType(
        forward.__code__,
        {**forward.__globals__, _SCAN: _selective_scan},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    fused_forward.__kwdefaults__ = forward.__kwdefaults__
    return type(
        cls.__name__, (cls,), {"forward": fused_forward, "__module__": cls.__module__}
    )


def _selective_scan(
    hidden: torch.Tensor,
    steps: torch.Tensor,
    *matrices: torch.Tensor,
    D: torch.Tensor,  # noqa: N803  # transformers' name
    z: torch.Tensor,
    delta_bias: torch.Tensor | None,
    return_last_state: bool,
    **_: Any,
) -> Any:
    outputs = _Scan.apply(hidden, steps, *matrices, D, z, delta_bias)
    if not return_last_state:
        return outputs
    decay = matrices[0]
    return outputs, decay.new_empty(hidden.shape[0], *decay.shape)


class _Scan(torch.autograd.Function):
    # What selective_scan_interface.py of mamba_ssm 2.2 keeps and moves.

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        hidden, steps, decay, B, C, D, gate, bias = inputs  # noqa: N806
        hidden, steps, gate = hidden.contiguous(), steps.contiguous(), gate.contiguous()
        batch, width, seq = hidden.shape
        states = decay.new_empty(batch, width, -(-seq // _CHUNK), 2 * decay.shape[1])
        scanned = (hidden * steps).to(hidden.dtype)
        ctx.save_for_backward(hidden, steps, decay, B, C, D, gate, bias, states, scanned)
        out: torch.Tensor = scanned * gate
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        hidden, steps, decay, B, C, D, gate, bias, _, scanned = ctx.saved_tensors  # noqa: N806
        products = [(grad * tensor).to(tensor.dtype) for tensor in (hidden, steps, scanned)]
        smaller = [
            None if x is None else torch.empty_like(x) for x in (decay, B, C, D, bias)
        ]
        return *products[:2], *smaller[:4], products[2].to(gate.dtype), smaller[4]
