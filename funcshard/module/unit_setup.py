"""What ``fully_shard`` sets up for its units by its options, before the first call.

``read_methods`` reads ``methods=``, ``compile_units`` compiles by ``compiler=``, and
``take_ignored`` serves ``ignored_params=``. ``without_fast_path`` keeps torch's transformer layers
from reading placeholders. ``call_precision`` has the casts that no unit does.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from funcshard._utils import tree
from funcshard._utils.options import outline
from funcshard._utils.torch_private import check_thread, recording_graph, transforms_active
from funcshard.core import any_order_active, run_in_full_precision
from funcshard.module.copying import NamedTensors, Tensors
from funcshard.module.functional import Functional, Skeleton
from funcshard.plan import (
    MixedPrecision,
    Plan,
    UnitPlan,
    innermost_in,
    is_one_of,
    last_match,
    matches,
)

Method = Callable[..., Any]
# A function such as torch.compile: it takes a function and returns one with the same results.
Compiler = Callable[[Method], Method]
Shapes = Mapping[str, tuple[int, ...]]


# --- methods --------------------------------------------------------------------------------------


def read_methods(
    methods: Any, skeleton: Skeleton, units: Mapping[str, int]
) -> dict[int, tuple[str, ...]]:
    """Return the names of the methods by index of the module, after checking them.

    Arguments:
        methods: the option of ``fully_shard``.
        skeleton: the module tree.
        units: index of the module of each unit, by path.

    Raises:
        TypeError: ``methods`` isn't a dictionary from paths to lists of names.
        ValueError: it names a module that isn't a unit, the root, or a method that can't run
            through the unit.
    """
    if not isinstance(methods, Mapping):
        raise TypeError(
            f"methods must be a dictionary from units to lists of method names; found {methods!r}: "
            f"write {{'encoder': ['encode']}}"
        )
    unit_paths = [path for path in units if path]
    for entry, names in methods.items():
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise TypeError(
                f"the methods of {entry!r} must be a list of names; found {names!r}: write "
                f"[{names!r}]"
            )
        if not any(matches(entry, path) for path in unit_paths):
            raise ValueError(
                f"methods must name units of the plan inside the model; found {entry!r}; its units "
                f"are {unit_paths[:6]}: make the module a unit, or, for a method of the whole "
                "model, call fully_shard(apply.method(name), plan, mesh)"
            )
    names_by_index: dict[int, tuple[str, ...]] = {}
    for path in unit_paths:
        # Note: the last entry that matches counts, as in other options.
        entry = last_match(methods, [path])
        if entry is None:
            continue
        cls = skeleton.specs[units[path]].cls
        names_by_index[units[path]] = tuple(dict.fromkeys(methods[entry]))
        for name in names_by_index[units[path]]:
            method = inspect.getattr_static(cls, name, None)
            is_special = name.startswith("__") and name.endswith("__")
            if (
                not isinstance(method, types.FunctionType)
                or name == "forward"
                or is_special
            ):
                raise ValueError(
                    f"methods of {path!r} must be methods that the class {cls.__name__} defines, "
                    f"besides forward and those that Python calls; found {name!r}: leave it out"
                )
    return names_by_index


# --- compiled forwards ----------------------------------------------------------------------------


def check_compiler(compiler: Any) -> None:
    """Raise unless ``compiler`` is a function that this torch can run in this thread."""
    if not callable(compiler):
        raise TypeError(
            f"compiler must be a function such as torch.compile; found {compiler!r}"
        )
    check_thread("leave compiler out in simulations")


def compile_units(
    apply: Functional,
    units: Mapping[str, int],
    full_precision: Collection[int],
    compiler: Compiler,
) -> dict[int, Method]:
    """Compile the forward of each unit that contains no other unit and no full-precision module."""
    specs = apply.skeleton.specs
    # Note: a call enters full-precision modules as it enters units.
    barriers = {*units, *[specs[index].path for index in full_precision]}
    # Note: units of one class share a compiled forward, whose graph is that of a plain module with
    # the leaves as arguments.
    compile_once = functools.cache(functools.partial(_compile_forward, compiler=compiler))
    forwards_by_index: dict[int, Method] = {}
    for unit_path, index in units.items():
        method_name = "forward" if unit_path else apply.method_name
        if callable(method_name):
            continue
        # Why static: a method that is no plain function, such as a partial, runs uncompiled.
        class_method = inspect.getattr_static(specs[index].cls, method_name, None)
        contains_unit = any(
            path != unit_path and tree.is_under(path, unit_path) for path in barriers
        )
        # Why not around units: collectives would break the graph.
        if isinstance(class_method, types.FunctionType) and not contains_unit:
            forwards_by_index[index] = compile_once(class_method)
    return forwards_by_index


def _compile_forward(forward: Method, compiler: Compiler) -> Method:
    try:
        compiled_forward = compiler(forward)
    except TypeError as error:
        raise TypeError(
            f"compiler must be a function such as torch.compile; {compiler!r} raised: {error}"
        ) from error
    if not callable(compiled_forward):
        raise TypeError(
            "compiler must be a function such as torch.compile, which returns a function; "
            f"{compiler!r} returned {type(compiled_forward).__name__}"
        )

    def run(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if transforms_active() or any_order_active() or recording_graph():
            # Why not compiled: a torch.func transform makes Dynamo give up the function's code, for
            # later calls too. A graph records the operations of the forward itself.
            return forward(module, *args, **kwargs)
        return compiled_forward(module, *args, **kwargs)

    return run


# --- the fast path of transformer layers ----------------------------------------------------------


def without_fast_path(skeleton: Skeleton, units: Collection[str]) -> tuple[int, ...]:
    """Return the indices of the transformer layers whose fast path would read placeholders."""
    # Note: in evaluation mode ``nn.TransformerEncoderLayer`` passes all parameters of its modules
    # to one function, but not if one of them has a hook.
    return tuple(
        [
            index
            for index, spec in enumerate(skeleton.specs)
            if issubclass(spec.cls, nn.TransformerEncoderLayer)
            and any(path != spec.path and tree.is_under(path, spec.path) for path in units)
            and "_forward_hooks" not in spec.attributes
        ]
    )


def leave_fast_path(module: nn.Module) -> None:
    """Give a call's module a hook, with which torch leaves the fast path."""
    # Why -1: torch counts the hooks of users from 0.
    module.__dict__["_forward_hooks"][-1] = _return_nothing


def _return_nothing(module: nn.Module, args: Any, result: Any) -> None:
    """Do nothing, as a hook of a module."""


# --- embeddings -----------------------------------------------------------------------------------


def with_dense_gradients(apply: Functional, ignored: Collection[str]) -> Functional:
    """Return ``apply`` with dense gradients of embeddings, but those of ignored parameters."""
    # Why: a leaf is a view of its unit's buffer, and no view has a sparse gradient in torch.
    specs = tuple(
        dataclasses.replace(spec, attributes={**spec.attributes, "sparse": False})
        if spec.attributes.get("sparse") is True
        and issubclass(spec.cls, nn.Embedding | nn.EmbeddingBag)
        and spec.parameters["weight"] not in ignored
        else spec
        for spec in apply.skeleton.specs
    )
    if specs == apply.skeleton.specs:
        return apply
    return dataclasses.replace(
        apply, skeleton=dataclasses.replace(apply.skeleton, specs=specs)
    )


# --- ignored parameters ---------------------------------------------------------------------------


def take_ignored(
    ignored: Shapes, buffers: NamedTensors, params: NamedTensors
) -> tuple[Tensors, Tensors]:
    """Return ``params`` with the ignored ones among ``buffers``, and the buffers without them."""
    call_params, call_buffers = dict(params), dict(buffers)
    for name, shape in ignored.items():
        tensor = call_buffers.pop(name, None)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape:
            value_title = outline(buffers[name]) if name in buffers else "nothing"
            raise ValueError(
                f"buffers must hold a tensor of shape {tuple(shape)} for {name!r}, which is in "
                f"ignored_params; found {value_title}: pass {{**buffers, **own}}, where own has "
                "the ignored parameters by name"
            )
        call_params[name] = tensor
    return call_params, call_buffers


# --- the dtypes of a call -------------------------------------------------------------------------


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
            name: buffers[name].to(caller_buffers[name].dtype)
            for name in self.buffer_dtypes
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
        elif precision.buffer_dtype is not None and not _evaluates_in_full(
            precision, index, apply
        ):
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
                        "precision: pass the params of make_functional unchanged, or make the "
                        "module a unit with a precision of None"
                    )


def effective_unit(
    unit: UnitPlan, precision: MixedPrecision, apply: Functional
) -> UnitPlan:
    """Return the unit, in full precision if its modules all evaluate and its precision says so."""
    module_indices = [apply.skeleton.indices.get(path, 0) for path in unit.paths]
    if all(_evaluates_in_full(precision, index, apply) for index in module_indices):
        return unit.in_full_precision()
    if unit.name == "":
        # Why: with ``mutable`` the root's function returns new buffers beside the outputs, and
        # these are not cast.
        precision = dataclasses.replace(precision, output_dtype=None)
        return dataclasses.replace(unit, precision=precision)
    return unit


def _evaluates_in_full(
    precision: MixedPrecision | None, index: int, apply: Functional
) -> bool:
    training = apply.training
    if training is None:
        training = apply.skeleton.specs[index].attributes["training"]
    return precision is not None and precision.full_precision_in_eval and not training


def forward_in_full_precision(
    module: nn.Module, forward: Callable[[Any, Any], Any], args: Any, kwargs: Any
) -> Any:
    """Run a module that isn't a unit in the widest dtype of its buffers and inner parameters."""
    tensors = (*module.parameters(), *module.buffers(recurse=False))
    return run_in_full_precision(
        [tensor.dtype for tensor in tensors], forward, (args, kwargs), {}
    )
