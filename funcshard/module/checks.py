"""Errors for modules that cannot be functions."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

import torch
from torch import nn

from funcshard._utils.options import absent, other_names
from funcshard._utils.tensors import check_plain
from funcshard._utils.torch_private import callers_level, is_compiled_in_place
from funcshard.module.copying import NamedTensors

Modules = Sequence[tuple[str, nn.Module]]  # path and module

_EXCHANGES = "which exchanges its parameters or gradients by itself"
_IN_PLACE = "fs.fully_shard takes its place"
_COMPILE = "pass compiler=torch.compile to fully_shard, which compiles the forward of each unit"


def check_module(modules: Modules, parameters: NamedTensors, buffers: NamedTensors) -> None:
    """Raise, as ``make_functional`` says, unless the function of a tree of modules can be made."""
    for path, m in modules:
        reason = _why_refused(m)
        if reason is not None:
            raise TypeError(f"module {path or '(root)'!r} {reason}")
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None:
            weight_name = f"{path}.weight".removeprefix(".")
            raise ValueError(
                f"module {path or '(root)'!r} ({type(m).__name__}) has max_norm={m.max_norm}, so "
                f"its forward writes to its parameter {weight_name!r}, which no pure function does: "
                "set max_norm to None, and rescale the weight between steps or by "
                "torch.nn.utils.parametrize"
            )
    for noun, tensors in (("parameter", parameters), ("buffer", buffers)):
        for name, tensor in tensors.items():
            if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
                raise ValueError(
                    f"{name!r} of a lazy module has no shape yet; run the module once on a sample "
                    "input first"
                )
            check_plain(tensor, f"{noun} {name!r}")
    compiled_path = next((path for path, m in modules if is_compiled_in_place(m)), None)
    if compiled_path is not None:
        warnings.warn(
            f"module {compiled_path or '(root)'!r} was compiled in place, and make_functional uses "
            f"its uncompiled forward: {_COMPILE}, or apply torch.compile to the function that "
            "make_functional returns",
            stacklevel=callers_level(),
        )


def _why_refused(m: nn.Module) -> str | None:
    """Return why a call could not give a module its tensors, and what to do."""
    cls = type(m)
    if issubclass(cls, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return f"is parallelized by {cls.__name__}, {_EXCHANGES}; use its .module: {_IN_PLACE}"
    # Why by name: an import of torch.distributed.fsdp or torch._dynamo takes a while.
    if any(base.__module__.startswith("torch.distributed.fsdp.") for base in cls.__mro__):
        return f"is parallelized by FSDP, {_EXCHANGES}; use the module without it: {_IN_PLACE}"
    # Note: module.compile(), which compiles in place, is no wrapper; it only warns.
    if cls.__name__ == "OptimizedModule" and "_orig_mod" in m._modules:
        return (
            "was wrapped by torch.compile, and the wrapper always runs the module that it wraps, "
            "with that module's own parameters; use the wrapped module itself, its _orig_mod, and "
            f"{_COMPILE}"
        )
    if cls.__module__ == "torch.export.unflatten":
        return (
            "was made by torch.export.unflatten, and such modules cannot be copied: use the "
            ".module() of the exported program, or the module that was exported"
        )
    if issubclass(cls, torch.jit.ScriptModule):
        return (
            "was made by torch.jit, which runs it with parameters of its own that no call can "
            "replace: use the module from which it was made, and pass compiler=torch.compile to "
            "fully_shard for speed; torch.jit.script the result of training"
        )
    return None


def check_plan_names(parameters: Collection[str], planned: Collection[str]) -> None:
    """Raise ``ValueError`` unless the plan holds the parameters of the module, and no others."""
    if difference := other_names(parameters, planned):
        raise ValueError(
            f"the plan was made for another module, with other parameters than this one's; "
            f"{difference}: make the plan from the params of this module's make_functional, or name "
            "parameters that it should lack in ignored_params"
        )


# --- functions that are taken for modules ---------------------------------------------------------


_BEFORE = "the function has no parameters of its own: make_functional returned them as params"
_APPLY = {
    "parameters": _BEFORE,
    "state_dict": f"{_BEFORE}; call fs.to_state_dict(shards, plan, mesh) with shards",
    "to": "call module.to(...) before make_functional",
}
_SHARDED = {
    "eval": "call fully_shard(apply.eval(), plan, mesh), which takes the same shards",
    "train": "call fully_shard(apply.train(), plan, mesh), which takes the same shards",
    "parameters": "the parameters are the shards, which every call takes",
    "state_dict": "call fs.to_state_dict(shards, plan, mesh)",
    "load_state_dict": "call shards = fs.from_state_dict(state_dict, plan, mesh)",
    "no_sync": "pass accumulate= to make_train_step, or call fs.accumulate",
    "gradient_checkpointing_enable": "pass remat=True to fully_shard, or the names of units",
}


# By the function of the library that returned a function: what to do for the attributes of modules,
# and how to run a method of the module.
_ADVICE = {
    "make_functional": (_APPLY, "apply.method({!r})"),
    "fully_shard": (_SHARDED, "fs.fully_shard(apply.method({!r}), plan, mesh)"),
}


def absent_attribute(maker: str, name: str, cls: type | None) -> AttributeError:
    """Return the error for an attribute that a function lacks, with what to do.

    Arguments:
        maker: the function of the library that returned the function.
    """
    advice, method_call = _ADVICE[maker]
    is_method = callable(getattr(cls, name, None)) and not hasattr(nn.Module, name)
    if is_method and name not in advice and not name.startswith("_"):
        advice = {
            name: f"it is a method of the module, whose function is {method_call.format(name)}"
        }
    return absent(f"a function of {maker}", name, advice)
