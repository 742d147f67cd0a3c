"""One-time decisions of ``fully_shard`` about modules: their dtypes, and which are compiled.

- In which dtypes does a module compute? ``effective_unit`` and ``call_precision`` apply the plan's
  ``MixedPrecision`` to modules in training and in evaluation mode.
- Does a forward run compiled? ``compile_units`` compiles the forwards that contain no other unit.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from funcshard._utils import check_thread, recording_graph, transforms_active, tree
from funcshard.module.call_precision import CallPrecision
from funcshard.module.functional import Functional
from funcshard.plan import MixedPrecision, Plan, UnitPlan, innermost_in, is_one_of

# A function such as torch.compile: it takes a function and returns one with the same results.
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def call_precision(plan: Plan, apply: Functional) -> CallPrecision:
    """Return the casts that calls of ``apply`` need besides those of the plan's units.

    Raises:
        ValueError: a module of ``ignored_classes`` should compute in full precision, but a unit of
            lower precision owns one of its parameters.
    """
    if plan.precision is None and all(unit.precision is None for unit in plan.unit_list):
        # Why early: a model has thousands of modules.
        return CallPrecision(None, {}, frozenset())
    skeleton = apply.skeleton
    units = plan.units
    full_precision: list[int] = []
    innermost = innermost_in({name: unit.paths for name, unit in units.items()})
    full_precision_paths = [unit.name for unit in plan.unit_list if unit.full_precision]
    buffer_dtypes: dict[str, torch.dtype] = {}
    in_lower = {
        leaf.path for unit in plan.unit_list if unit.precision is not None for leaf in unit.leaves
    }
    cast = [
        name for path, names in skeleton.parameters.items() if path in in_lower for name in names
    ]
    for path, index in skeleton.paths().items():
        owner = innermost(path) or ""
        precision = units[owner].precision if owner in units else plan.precision
        if precision is None or any(tree.is_under(path, outer) for outer in full_precision_paths):
            continue
        spec = skeleton.specs[index]
        if is_one_of(spec.cls, precision.ignored_classes) and path:
            inside = [name for name in cast if tree.is_under(name, path)]
            if inside:
                raise ValueError(
                    f"module {path!r} is a {spec.cls.__name__}, which ignored_classes wants in "
                    f"full precision, but its parameter {inside[0]!r} is in unit "
                    f"{owner or '(root)'!r}, of lower precision: pass make_plan the params of "
                    "make_functional unchanged, or name the module among the units, with a "
                    "precision of None"
                )
            full_precision_paths.append(path)
            full_precision.append(index)
        elif (
            precision.buffer_dtype is not None
            and _effective_precision(precision, index, apply) is not None
        ):
            buffer_dtypes.update(
                {name: precision.buffer_dtype for name in spec.buffers.values() if name is not None}
            )
    root = units[""].precision if "" in units else plan.precision
    return CallPrecision(
        _effective_precision(root, 0, apply), buffer_dtypes, frozenset(full_precision)
    )


def effective_unit(unit: UnitPlan, apply: Functional) -> UnitPlan:
    """Return the unit, in full precision if its module evaluates and its precision asks for it.

    A group is in full precision if all of its modules evaluate. The root is returned without
    ``output_dtype``: with ``mutable`` its function returns new buffers beside the outputs, and
    these are not cast.
    """
    if unit.precision is None:
        return unit
    indices = [apply.skeleton.find(path) or 0 for path in unit.paths]
    if all(
        _effective_precision(unit.precision, index, apply) is not unit.precision
        for index in indices
    ):
        return unit.in_full_precision()
    if unit.name == "" and unit.precision is not None and unit.precision.output_dtype is not None:
        return dataclasses.replace(
            unit, precision=dataclasses.replace(unit.precision, output_dtype=None)
        )
    return unit


def _effective_precision(
    precision: MixedPrecision | None, index: int, apply: Functional
) -> MixedPrecision | None:
    """Return ``precision``, or ``None`` for full precision if the module evaluates in that."""
    training = (
        apply.skeleton.specs[index].attributes["training"]
        if apply.training is None
        else apply.training
    )
    return (
        None
        if precision is None or (precision.full_precision_in_eval and not training)
        else precision
    )


# --- compilation ----------------------------------------------------------------------------------


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
    inner = {
        *units,
        *(path for path, index in apply.skeleton.paths().items() if index in full_precision),
    }
    chosen: dict[str, Callable[..., Any]] = {}
    for name, index in units.items():
        cls = apply.skeleton.specs[index].cls
        chosen_method = "forward" if name else apply.method_name
        method = (
            None if callable(chosen_method) else inspect.getattr_static(cls, chosen_method, None)
        )
        innermost = not any(
            other_name != name and tree.is_under(other_name, name) for other_name in inner
        )
        if innermost and isinstance(method, types.FunctionType):
            chosen[name] = method
    functions = {
        method: _compile_forward(method, compiler) for method in dict.fromkeys(chosen.values())
    }
    return {name: functions[method] for name, method in chosen.items()}


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
