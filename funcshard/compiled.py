"""Which units are compiled, and how a compiled forward runs on the module objects of a call."""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from funcshard import tree
from funcshard.functional import Functional

__all__ = ["Compiler", "check_compiler", "compiled"]

# what torch.compile does: a function -> one that returns the same, faster
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def check_compiler(compiler: Any) -> None:
    """Raise unless ``compiler`` is a function that may be used here."""
    if not callable(compiler):
        raise TypeError(f"compiler must be a function such as torch.compile; found {compiler!r}")
    if torch.__version__ < "2.13" and threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"torch before 2.13 crashes the process when several threads compile, as simulated ranks do; found "
            f"{torch.__version__}: leave compiler out in simulations, or take a newer torch"
        )


def compiled(
    apply: Functional, units: Mapping[str, int], islands: Collection[int], compiler: Compiler
) -> dict[str, Callable[..., Any]]:
    """Compile the forward of each unit that no other unit, and no island, is inside of; that of a class once.

    Arguments:
        apply: the function of the whole model; the root runs its method.
        units: the number of each unit's module, by the unit's name.
        islands: numbers of modules that run in full precision without being units.
        compiler: what compiles a function.

    Returns:
        ``{name of a unit: function of its module and inputs}``, without the units that stay as they are.
    """
    inner = {*units, *(path for path, number in apply.skeleton.paths().items() if number in islands)}
    chosen: dict[str, tuple[Callable[..., Any], type[nn.Module]]] = {}
    for name, number in units.items():
        cls = apply.skeleton.parts[number].cls
        method = inspect.getattr_static(cls, "forward" if name else apply.method_name, None)
        alone = not any(other != name and tree.is_under(other, name) for other in inner)
        if alone and isinstance(method, types.FunctionType):
            chosen[name] = (method, cls)
    functions = {method: _compiled(*method, compiler) for method in dict.fromkeys(chosen.values())}
    return {name: functions[method] for name, method in chosen.items()}


def _compiled(forward: Callable[..., Any], cls: type[nn.Module], compiler: Compiler) -> Callable[..., Any]:
    fast = compiler(forward)

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch._C._are_functorch_transforms_active():  # where Dynamo gives its code up, for later calls too
            return forward(module, *args, **kwargs)
        own, module.__class__ = module.__class__, cls  # what is compiled is for a class, and a unit's differs each time
        try:
            return fast(module, *args, **kwargs)
        finally:
            module.__class__ = own

    return run
