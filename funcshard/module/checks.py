"""The modules that ``make_functional`` refuses, because their functions would be wrong."""

from __future__ import annotations

import warnings
from collections.abc import Collection

import torch
from torch import nn

from funcshard._utils import callers_level, check_plain, is_compiled_in_place
from funcshard.module.walking import ModuleTree

_EXCHANGES = "which exchanges its parameters or gradients by itself"
_IN_PLACE = "fs.fully_shard takes its place"
_COMPILE = "pass compiler=torch.compile to fully_shard, which compiles the forward of each unit"


def check_module(tree: ModuleTree) -> None:
    """Raise unless the function of a module can be made, of which ``tree`` is the tree.

    Raises:
        TypeError: DistributedDataParallel or FSDP runs one of its modules; ``torch.compile``,
            ``torch.jit`` or ``torch.export.unflatten`` made one; a parameter or buffer is of a
            tensor class with its own operations.
        ValueError: a lazy module has not been initialised; a module writes to its parameter in
            forward.
    """
    for path, m in tree.modules:
        reason = _why_refused(m)
        if reason is not None:
            raise TypeError(f"module {path or '(root)'!r} {reason}")
    _check_tensors(tree)
    _check_max_norm(tree)
    _warn_of_compiled(tree)


def _why_refused(m: nn.Module) -> str | None:
    """Return why a call could not give a module its tensors, and what to do; ``None`` if it can."""
    cls = type(m)
    if issubclass(cls, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return f"is parallelized by {cls.__name__}, {_EXCHANGES}; use its .module: {_IN_PLACE}"
    # Why by name: an import of torch.distributed.fsdp or torch._dynamo takes a while.
    if any(base.__module__.startswith("torch.distributed.fsdp.") for base in cls.__mro__):
        return f"is parallelized by FSDP, {_EXCHANGES}; use the module without it: {_IN_PLACE}"
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


def _check_tensors(tree: ModuleTree) -> None:
    for kind, tensors in (("parameter", tree.parameters), ("buffer", tree.buffers)):
        for name, tensor in tensors.items():
            if type(tensor) in (nn.Parameter, torch.Tensor):
                continue  # only for speed
            if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
                raise ValueError(
                    f"{name!r} of a lazy module has no shape yet; run the module once on a sample "
                    "input first"
                )
            check_plain(tensor, f"{kind} {name!r}")


def _check_max_norm(tree: ModuleTree) -> None:
    for name, m in tree.modules:
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None:
            weight = f"{name}.weight".removeprefix(".")
            raise ValueError(
                f"module {name or '(root)'!r} ({type(m).__name__}) has max_norm={m.max_norm}, so "
                f"its forward writes to its parameter {weight!r}, and a pure function cannot keep "
                "that change: set the module's max_norm to None, and rescale the weight between "
                "steps, or in forward by torch.nn.utils.parametrize"
            )


def _warn_of_compiled(tree: ModuleTree) -> None:
    name = next((name for name, m in tree.modules if is_compiled_in_place(m)), None)
    if name is not None:
        warnings.warn(
            f"module {name or '(root)'!r} was compiled in place, and make_functional uses its "
            f"uncompiled forward: {_COMPILE}, or apply torch.compile to the function that "
            "make_functional returns",
            stacklevel=callers_level(),
        )


def check_plan_names(parameters: Collection[str], planned: Collection[str]) -> None:
    """Raise ``ValueError`` unless the plan holds the parameters of the module, and no others."""
    missing, unexpected = sorted({*parameters} - {*planned}), sorted({*planned} - {*parameters})
    if missing or unexpected:
        raise ValueError(
            f"the plan was made for another module; it lacks {missing[:3] or 'nothing'} of this "
            f"one's parameters and has {unexpected[:3] or 'nothing'} besides: make the plan from "
            "the params of this module's make_functional, or name parameters that it should lack "
            "in ignored_params"
        )
