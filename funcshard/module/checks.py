"""The modules that ``make_functional`` refuses, because their functions would be wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection

import torch
from torch import nn

from funcshard._utils import callers_level, check_plain, is_compiled_in_place
from funcshard.module.walking import ModuleTree


def check_module(tree: ModuleTree) -> None:
    """Raise unless the function of a module can be made, of which ``tree`` is the tree.

    Raises:
        TypeError: DistributedDataParallel or FSDP runs one of its modules; ``torch.compile``,
            ``torch.jit`` or ``torch.export.unflatten`` made one; a parameter or buffer is of a
            tensor class with operations of its own.
        ValueError: a lazy module has not been initialised; a module writes to its parameter in
            forward.
    """
    _check_parallel(tree)
    _check_tensors(tree)
    _check_compiled(tree)
    _check_made_by_torch(tree)
    _check_max_norm(tree)


def _check_parallel(tree: ModuleTree) -> None:
    """Raise for a module whose forward is parallel already, by a wrapper or by hooks of torch."""
    # Why by name: an import of torch.distributed.fsdp for this check takes a while.

    def by_fsdp(cls: type) -> bool:
        return any(each.__module__.startswith("torch.distributed.fsdp.") for each in cls.__mro__)

    wrappers = nn.DataParallel, nn.parallel.DistributedDataParallel
    for name, m in _of(tree, lambda cls: issubclass(cls, wrappers) or by_fsdp(cls)):
        whole = isinstance(m, wrappers)
        raise TypeError(
            f"module {name or '(root)'!r} is parallelized by "
            f"{type(m).__name__ if whole else 'FSDP'}, which exchanges its parameters or gradients "
            f"by itself; use {'its .module' if whole else 'the module without it'}: fs.fully_shard "
            "takes its place"
        )


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


def _of(
    tree: ModuleTree, suspicious: Callable[[type[nn.Module]], bool]
) -> list[tuple[str, nn.Module]]:
    """Return path and module of the modules of suspicious classes."""
    return [(path, m) for path, m in tree.modules if suspicious(type(m))]


def _check_compiled(tree: ModuleTree) -> None:
    """Raise for a module that ``torch.compile`` wrapped; warn about one compiled in place."""
    remedy = "pass compiler=torch.compile to fully_shard, which compiles the forward of each unit"
    # Why by name: the class is in torch._dynamo, which would have to be imported for this check.
    for name, m in _of(tree, lambda cls: cls.__name__ == "OptimizedModule"):
        if "_orig_mod" in m._modules:
            raise TypeError(
                f"module {name or '(root)'!r} was wrapped by torch.compile, and the wrapper always "
                "runs the module that it wraps, with that module's own parameters; use the "
                f"wrapped module itself, its _orig_mod, and {remedy}"
            )
    for name, m in tree.modules:
        if is_compiled_in_place(m):
            warnings.warn(
                f"module {name or '(root)'!r} was compiled in place, and make_functional uses its "
                f"uncompiled forward: {remedy}, or apply torch.compile to the function that "
                "make_functional returns",
                stacklevel=callers_level(),
            )
            return


def _check_made_by_torch(tree: ModuleTree) -> None:
    def by_torch(cls: type) -> bool:
        exported = cls.__module__ == "torch.export.unflatten"
        return exported or issubclass(cls, torch.jit.ScriptModule)

    for name, m in _of(tree, by_torch):
        if type(m).__module__ == "torch.export.unflatten":
            raise TypeError(
                f"module {name or '(root)'!r} was made by torch.export.unflatten, and such modules "
                "cannot be copied: use the .module() of the exported program, or the module that "
                "was exported"
            )
        raise TypeError(
            f"module {name or '(root)'!r} was made by torch.jit, which runs it with parameters of "
            "its own that no call can replace: use the module from which it was made, and pass "
            "compiler=torch.compile to fully_shard for speed; torch.jit.script the result of "
            "training"
        )


def _check_max_norm(tree: ModuleTree) -> None:
    for name, m in _of(tree, lambda cls: issubclass(cls, (nn.Embedding, nn.EmbeddingBag))):
        if m.max_norm is not None:
            weight = f"{name}.weight".removeprefix(".")
            raise ValueError(
                f"module {name or '(root)'!r} ({type(m).__name__}) has max_norm={m.max_norm}, so "
                f"its forward writes to its parameter {weight!r}, and a pure function cannot keep "
                "that change: set the module's max_norm to None, and rescale the weight between "
                "steps, or in forward by torch.nn.utils.parametrize"
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
