"""The dtypes of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from funcshard._utils import tree
from funcshard.core import run_in_full_precision
from funcshard.module.copying import NamedTensors, Tensors
from funcshard.module.functional import Functional
from funcshard.plan import MixedPrecision, Plan, UnitPlan, innermost_in, is_one_of


@dataclass(frozen=True, slots=True, eq=False)
class CallPrecision:
    """The casts of a call that no unit does.

    Attributes:
        root: the precision that casts the outputs of the whole model, and its inputs if there is no
            root unit.
        buffer_dtypes: name of each buffer that is cast -> its dtype during the call.
        full_precision: indices of the modules that compute in full precision without being units,
            because they own no parameters.
    """

    root: MixedPrecision | None
    buffer_dtypes: dict[str, torch.dtype]
    full_precision: frozenset[int]

    def cast_buffers(self, buffers: Tensors) -> Tensors:
        """Return the buffers in the dtypes of the call."""
        cast = {
            name: buffers[name].to(dtype)
            for name, dtype in self.buffer_dtypes.items()
            if buffers[name].is_floating_point()  # a counter of batches stays an integer
        }
        return {**buffers, **cast}

    def restore_buffers(self, buffers: Tensors, caller_buffers: NamedTensors) -> Tensors:
        """Return the new buffers of a call in the dtypes of the caller's."""
        restored = {
            name: buffers[name].to(caller_buffers[name].dtype) for name in self.buffer_dtypes
        }
        return {**buffers, **restored}


def call_precision(plan: Plan, apply: Functional) -> CallPrecision:
    """Return the casts that calls of ``apply`` need besides those of the plan's units.

    Raises:
        ValueError: a module of ``ignored_classes`` should compute in full precision, but a unit of
            lower precision owns one of its parameters.
    """
    units, specs = plan.units, apply.skeleton.specs
    if plan.precision is None and all(unit.precision is None for unit in units.values()):
        # Why early: a model has thousands of modules.
        return CallPrecision(None, {}, frozenset())
    innermost_unit = innermost_in({name: unit.paths for name, unit in units.items()})
    full_precision_paths = [name for name, unit in units.items() if unit.full_precision]
    full_precision: list[int] = []
    buffer_dtypes: dict[str, torch.dtype] = {}
    # Note: parents come first, so what is inside a full-precision module is met after it.
    for index, spec in enumerate(specs):
        path = spec.path
        unit = units.get(innermost_unit(path) or "")
        precision = plan.precision if unit is None else unit.precision
        if precision is None or tree.is_under_any(path, full_precision_paths):
            continue
        if path and is_one_of(spec.cls, precision.ignored_classes):
            _check_uncast(path, plan, apply)
            full_precision_paths.append(path)
            full_precision.append(index)
        elif precision.buffer_dtype is not None and not _evaluates_in_full(precision, index, apply):
            buffer_names = [name for name in spec.buffers.values() if name is not None]
            buffer_dtypes.update(dict.fromkeys(buffer_names, precision.buffer_dtype))
    root_precision = units[""].precision if "" in units else plan.precision
    if _evaluates_in_full(root_precision, 0, apply):
        root_precision = None
    return CallPrecision(root_precision, buffer_dtypes, frozenset(full_precision))


def _check_uncast(path: str, plan: Plan, apply: Functional) -> None:
    for unit in plan.unit_list:
        for leaf in unit.leaves if unit.precision is not None else ():
            for leaf_name in apply.skeleton.parameters[leaf.path]:
                if tree.is_under(leaf_name, path):
                    raise ValueError(
                        f"module {path!r} is of ignored_classes, which are in full precision, but "
                        f"its parameter {leaf_name!r} is in unit {unit.title!r}, of lower "
                        "precision: pass make_plan the params of make_functional unchanged, or "
                        "name the module among the units, with a precision of None"
                    )


def effective_unit(unit: UnitPlan, apply: Functional) -> UnitPlan:
    """Return the unit, in full precision if its modules all evaluate and its precision says so."""
    precision = unit.precision
    if precision is None:
        return unit
    module_indices = [apply.skeleton.indices.get(path, 0) for path in unit.paths]
    if all(_evaluates_in_full(precision, index, apply) for index in module_indices):
        return unit.in_full_precision()
    if unit.name == "":
        # Why: with ``mutable`` the root's function returns new buffers beside the outputs, and
        # these are not cast.
        precision = dataclasses.replace(precision, output_dtype=None)
        return dataclasses.replace(unit, precision=precision)
    return unit


def _evaluates_in_full(precision: MixedPrecision | None, index: int, apply: Functional) -> bool:
    training = apply.training
    if training is None:
        training = apply.skeleton.specs[index].attributes["training"]
    return precision is not None and precision.full_precision_in_eval and not training


def forward_in_full_precision(
    module: nn.Module, forward: Callable[[Any, Any], Any], args: Any, kwargs: Any
) -> Any:
    """Run a module that is no unit in the widest dtype of its buffers and inner parameters."""
    tensors = (*module.parameters(), *module.buffers(recurse=False))
    float_dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    widest_dtype = max(float_dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
    return run_in_full_precision(widest_dtype, forward, (args, kwargs), {})
