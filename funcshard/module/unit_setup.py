"""Which forwards of ``fully_shard`` run compiled: those that contain no other unit."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from funcshard._utils import check_thread, recording_graph, transforms_active, tree
from funcshard.module.functional import Functional

# A function such as torch.compile: it takes a function and returns one with the same results.
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def check_compiler(compiler: Any) -> None:
    """Raise unless ``compiler`` is a function that this torch can run in this thread."""
    if not callable(compiler):
        raise TypeError(f"compiler must be a function such as torch.compile; found {compiler!r}")
    check_thread("leave compiler out in simulations")


def compile_units(
    apply: Functional, units: Mapping[str, int], full_precision: Collection[int], compiler: Compiler
) -> dict[str, Callable[..., Any]]:
    """Compile the forward of each unit that contains no other unit and no full-precision module.

    A compiled forward contains nothing of this library: its graph is that of a plain module, with
    the leaves as arguments. Units of one class share one compiled forward.

    Arguments:
        apply: the function of the whole model, whose method the root unit runs.
        units: path of each module that is, or is part of, a unit -> its index.
        full_precision: indices of modules that run in full precision without being units.
        compiler: the function that compiles a forward.

    Returns:
        ``{path: compiled forward}`` for the modules that are compiled; a compiled forward
        takes the module and its inputs.
    """
    specs = apply.skeleton.specs
    paths = {path for path, index in apply.skeleton.paths().items() if index in full_precision}
    compiled: dict[Any, Callable[..., Any]] = {}
    chosen: dict[str, Callable[..., Any]] = {}
    for name, index in units.items():
        method_name = "forward" if name else apply.method_name
        if callable(method_name):
            continue
        method = inspect.getattr_static(specs[index].cls, method_name, None)
        around = any(path != name and tree.is_under(path, name) for path in {*units, *paths})
        if isinstance(method, types.FunctionType) and not around:
            if method not in compiled:
                compiled[method] = _compile_forward(method, compiler)
            chosen[name] = compiled[method]
    return chosen


def _compile_forward(forward: Callable[..., Any], compiler: Compiler) -> Callable[..., Any]:
    try:
        compiled = compiler(forward)
    except TypeError as error:
        raise TypeError(
            f"compiler must be a function such as torch.compile; {compiler!r} raised: {error}"
        ) from error
    if not callable(compiled):
        raise TypeError(
            "compiler must be a function such as torch.compile, which returns a function; "
            f"{compiler!r} returned {type(compiled).__name__}"
        )

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if transforms_active() or recording_graph():
            # Why not compiled: a torch.func transform makes Dynamo give up the function's code, for
            # later calls too. A graph records the operations of the forward itself.
            return forward(module, *args, **kwargs)
        return compiled(module, *args, **kwargs)

    return run
