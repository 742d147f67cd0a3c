"""One rank's part of a model under tensor parallelism, with its collectives.

The cuts are those of the plan that transformers has for the model's class, ``tp_plan="auto"``: each
part's first matrices are cut by columns and its last one by rows, and a sum over the ranks follows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from funcshard.plan import matches

AXIS = "tensor"

# By the name of a style: how many dimensions from the end of a weight the cut one is, and what the
# ranks do with the outputs. ``None`` cuts nothing.
_STYLES: Mapping[str, tuple[int | None, str]] = {
    "colwise": (2, ""),
    "packed_colwise": (2, ""),
    "colwise_gather_output": (2, "gather"),
    "rowwise": (1, "sum"),
    "packed_rowwise": (1, "sum"),
    "rowwise_split_input": (1, "split and sum"),
    "embedding_rowwise": (2, "sum"),
    "moe_tp_experts": (None, "sum"),
    "replicated_with_grad_allreduce": (None, ""),
    "mla_kv_a_proj": (None, ""),
}


def cut_along_tensor(module: nn.Module, ranks: int) -> dict[str, dict[str, int]]:
    """Leave one rank's part of a model of transformers, and return ``local`` of ``make_plan``.

    Arguments:
        module: the model, on the meta device, which changes.
        ranks: number of ranks that divide each layer.

    Raises:
        ValueError: the class has no such plan, or the ranks divide a matrix unequally.
    """
    tp_plan: Mapping[str, str] = getattr(module, "tp_plan", None) or {}
    config: Any = getattr(module, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, ranks)
        if tp_plan and heads % ranks:
            raise ValueError(
                f"tensor must divide {name}; found {ranks} and {heads}: pass a divisor"
            )
    local: dict[str, dict[str, int]] = {}
    cut_params: dict[
        int, nn.Parameter
    ] = {}  # by identity of the whole ones, for those that are tied
    modules = dict(module.named_modules())
    for name, style in _with_adapters(_styles_of(module, tp_plan), modules):
        if style not in _STYLES:
            raise ValueError(
                f"tensor can't cut {name!r}, whose style is {style!r}: leave out the axis"
            )
        dims, after = _STYLES[style]
        owner_name, _, param_name = name.rpartition(".")
        owner, own_names = modules.get(name), ["weight", "bias"]
        if owner is None:  # a matrix of experts
            owner, own_names, after = modules[owner_name], [param_name], ""
        if dims is not None:
            for own_name in own_names:
                path = f"{name}.{own_name}" if name in modules else name
                _cut(owner, own_name, path, dims, ranks, cut_params, local)
        if after:
            # Why a class: the modules of a kind must be equal, and hooks would differ.
            owner_class: Any = type(owner)
            owner.__class__ = _communicating(owner_class, after, ranks)
    if not local:
        raise ValueError(
            f"tensor cuts models of transformers that have a tp_plan; found {type(module).__name__}, "
            "which has none: leave out the axis"
        )
    return local


def _styles_of(module: nn.Module, tp_plan: Mapping[str, str]) -> dict[str, str]:
    """Return the style of each module and parameter that a plan names."""
    names = [name for name, _ in (*module.named_modules(), *module.named_parameters())]
    return {
        name: style
        for pattern, style in tp_plan.items()
        for name in names
        if matches(pattern, name)
    }


def _with_adapters(
    styles: Mapping[str, str], modules: Mapping[str, nn.Module]
) -> Iterator[tuple[str, str]]:
    """Yield styles in which a layer's adapters are cut beside it, as peft does."""
    for name, style in styles.items():
        layer: Any = modules.get(name)
        if not hasattr(layer, "base_layer"):
            yield name, style
            continue
        yield f"{name}.base_layer", style
        # Note: of a cut by columns, each rank has all of A, and of a cut by rows all of B.
        side = "lora_A" if style in ("rowwise", "packed_rowwise") else "lora_B"
        yield f"{name}.{side}.default", style


def _cut(
    owner: nn.Module,
    own_name: str,
    path: str,
    dims: int,
    ranks: int,
    cut_params: dict[int, nn.Parameter],
    local: dict[str, dict[str, int]],
) -> None:
    """Cut a parameter of a module."""
    param = owner._parameters.get(own_name)
    if param is None or (param.ndim == 1 and dims == 1):
        return  # no bias, or one that is added to the sum
    dim = max(param.ndim - dims, 0)
    if param.shape[dim] % ranks:
        raise ValueError(
            f"tensor must divide dimension {dim} of {path!r}; found {tuple(param.shape)} and {ranks} "
            "ranks: pass a divisor"
        )
    if id(param) not in cut_params:
        shape = list(param.shape)
        shape[dim] //= ranks
        cut_params[id(param)] = nn.Parameter(param.new_empty(shape), param.requires_grad)
        local[path] = {AXIS: dim}
    owner._parameters[own_name] = cut_params[id(param)]


@functools.cache
def _communicating(module_class: Any, after: str, ranks: int) -> Any:
    """Return a class of modules whose outputs the ranks add up or gather."""
    forward: Callable[..., Any] = module_class.forward

    def communicating(self: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if after == "split and sum":
            x = x.narrow(-1, 0, x.shape[-1] // ranks)
        out = forward(self, x, *args, **kwargs)
        return (_Gathered if after == "gather" else _Summed).apply(out, ranks)

    return type(module_class.__name__, (module_class,), {"forward": communicating})


class _Summed(torch.autograd.Function):
    """The sum over the ranks; a trace reads the collectives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int) -> Any:
        ctx.ranks = ranks
        return torch.ops.funcshard.all_reduce(x.contiguous(), None, "", AXIS, ranks, "")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Summed.apply(grad, ctx.ranks), None


class _Gathered(torch.autograd.Function):
    """The outputs of all ranks, side by side."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int) -> Any:
        ctx.ranks = ranks
        gathered = torch.ops.funcshard.all_gather(
            x.contiguous(), False, None, "", AXIS, ranks, ""
        )
        return gathered.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        parts = [grad.contiguous()]
        scattered = torch.ops.funcshard.reduce_scatter(
            parts, grad.dtype, None, "", AXIS, ctx.ranks, ""
        )
        return scattered.view(*grad.shape[:-1], -1), None
