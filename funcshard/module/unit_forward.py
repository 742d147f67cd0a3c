"""How the module of a unit runs inside one call of ``fully_shard``.

Every call has module objects of its own (see ``skeleton``). ``fully_shard`` gives the module of each unit a class for the
call, ``unit_class``, whose ``forward`` runs the original forward through the unit's combinators. User code calls the module
as before, in any order and any number of times. The rest of this file answers three questions about the original forward:

- Which parameters does it read? ``forward_with_leaves`` puts the unit's gathered leaves into the parameter tables of the
  unit's modules while the forward runs.
- In which dtypes does it compute? ``effective_unit``, ``CallPrecision`` and ``forward_in_full_precision`` apply the plan's
  ``MixedPrecision`` to modules in training and in evaluation mode.
- Does it run compiled? ``compile_units`` compiles the forwards that contain no other unit.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from funcshard._utils import transforms_active, tree
from funcshard.core import RecomputeParams, current_unit, run_in_full_precision
from funcshard.module.functional import Functional
from funcshard.module.skeleton import Skeleton
from funcshard.plan import MixedPrecision, Plan, UnitPlan, is_one_of

__all__ = [
    "CallPrecision",
    "Compiler",
    "TableEntries",
    "UnitClasses",
    "call_precision",
    "check_compiler",
    "compile_units",
    "effective_unit",
    "forward_in_full_precision",
    "forward_with_leaves",
    "table_entries",
    "unit_class",
    "with_method",
]

# A module's class -> the subclass that the module has during a call of fully_shard.
UnitClasses = dict[type[nn.Module], type[nn.Module]]

# The parameter tables that hold a unit's leaves: path of a module below the unit's module -> (key in the module's
# parameter table, index of the leaf in the unit), as tuples.
TableEntries = tuple[tuple[tuple[str, ...], tuple[tuple[str, int], ...]], ...]

# A function such as torch.compile: it takes a function and returns one with the same results.
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def unit_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of ``cls`` whose ``forward`` runs the forward of ``cls`` inside the unit.

    ``fully_shard`` sets ``_funcshard_run`` on the module, which runs the unit. It may also set ``_funcshard_forward``, for a
    forward that was set on the module object, or ``_funcshard_compiled``, for a compiled forward of ``cls``.
    """

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__
        own = state.get("_funcshard_forward") or functools.partial(state.get("_funcshard_compiled") or cls.forward, self)
        return state["_funcshard_run"](self, lambda args, kwargs: own(*args, **kwargs), args, kwargs)

    return with_method(cls, "forward", forward)


def with_method(cls: type[nn.Module], name: str, method: Callable[..., Any]) -> type[nn.Module]:
    """Return a subclass of ``cls``, under the same name, with ``method`` as its method ``name``."""
    return type(cls.__name__, (cls,), {name: method, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


# --- parameters ----------------------------------------------------------------------------------------------------------


def table_entries(unit: UnitPlan, skeleton: Skeleton) -> TableEntries:
    """Return the entries of parameter tables, below the unit's module, that hold the leaves of ``unit``."""
    found: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for index, leaf in enumerate(unit.leaves):
        for name in skeleton.parameters[leaf.path]:
            *modules, key = name[len(unit.name) + 1 if unit.name else 0 :].split(".")
            found.setdefault(tuple(modules), []).append((key, index))
    return tuple((path, tuple(entries)) for path, entries in found.items())


def forward_with_leaves(
    tables: TableEntries,
    leaves: list[torch.Tensor],
    module: nn.Module,
    forward: Callable[[Any, Any], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run ``forward`` while the tables of the modules below ``module`` hold the unit's gathered ``leaves``.

    Afterwards, or after an exception, the tables hold the placeholders again.
    """
    # Dictionary, key, and the value that the dictionary holds after forward.
    afterwards: list[tuple[dict[str, Any], str, Any]] = []
    saved = current_unit.get() if torch.is_grad_enabled() else None
    try:
        for path, entries in tables:
            owner = module
            for name in path:
                owner = owner._modules[name]  # type: ignore[assignment]
            table = owner._parameters
            if saved is not None:
                # Why another table afterwards: a checkpoint inside the unit runs parts of this forward again from backward,
                # and then has to read the leaves, gathered again. All other code has to read the placeholders.
                afterwards.append((owner.__dict__, "_parameters", RecomputeParams(table, saved, dict(entries))))
                table = owner.__dict__["_parameters"] = dict(table)
            else:
                afterwards += [(table, key, table[key]) for key, _ in entries]
            for key, index in entries:
                table[key] = leaves[index]  # type: ignore[assignment]
            if isinstance(owner, nn.RNNBase):
                # Why: an RNN keeps a second list of its weights, which would keep the gathered leaves alive.
                afterwards.append((owner.__dict__, "_flat_weights", []))
        return forward(args, kwargs)
    finally:
        for table, key, value in afterwards:
            table[key] = value


# --- mixed precision -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class CallPrecision:
    """The casts of a call that belong to no unit: inputs of the model, buffers, and modules without parameters.

    Attributes:
        root_inputs: the precision that says how the inputs of the whole model are cast if the plan has no root unit.
        buffer_dtypes: name of each buffer that is cast -> its dtype during the call.
        full_precision: indices of the modules that compute in full precision without being units, because they have no
            parameters or because units inside them own all of their parameters.
    """

    root_inputs: MixedPrecision | None
    buffer_dtypes: dict[str, torch.dtype]
    full_precision: frozenset[int]

    def cast_buffers(self, buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a call's buffers in the dtypes that the call computes in; ``restore_buffers`` is the inverse."""
        dtypes = {name: dtype for name, dtype in self.buffer_dtypes.items() if buffers[name].is_floating_point()}
        return {name: b.to(dtypes[name]) if name in dtypes else b for name, b in buffers.items()}

    def restore_buffers(
        self, buffers: dict[str, torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the new buffers of a call in the dtypes of the buffers that were given to it."""
        return {name: b.to(given[name].dtype) if name in self.buffer_dtypes else b for name, b in buffers.items()}


def call_precision(plan: Plan, apply: Functional) -> CallPrecision:
    """Return the casts that calls of ``apply`` need besides those of the plan's units.

    Raises:
        ValueError: a module of ``ignored_classes`` should compute in full precision, but a unit of lower precision owns one
            of its parameters.
    """
    skeleton = apply.skeleton
    units = plan.units
    full_precision: list[int] = []
    full_precision_paths = [unit.name for unit in plan.unit_list if unit.full_precision]
    buffer_dtypes: dict[str, torch.dtype] = {}
    uncast = {leaf.path for unit in plan.unit_list if unit.precision is None for leaf in unit.leaves}
    cast = [name for path, names in skeleton.parameters.items() if path not in uncast for name in names]
    for path, index in skeleton.paths().items():
        owner = max((name for name in ("", *units) if tree.is_under(path, name)), key=len)  # the innermost unit
        precision = units[owner].precision if owner in units else plan.precision
        if precision is None or any(tree.is_under(path, outer) for outer in full_precision_paths):
            continue
        spec = skeleton.specs[index]
        if is_one_of(spec.cls, precision.ignored_classes) and path:
            inside = [name for name in cast if tree.is_under(name, path)]
            if inside:
                raise ValueError(
                    f"module {path!r} is a {spec.cls.__name__}, which ignored_classes wants in full precision, but its "
                    f"parameter {inside[0]!r} is in unit {owner or '(root)'!r}, of lower precision: pass make_plan the "
                    f"params of make_functional unchanged, or name the module among the units, with a precision of None"
                )
            full_precision_paths.append(path)
            full_precision.append(index)
        elif precision.buffer_dtype is not None and _effective_precision(precision, index, apply) is not None:
            buffer_dtypes.update({name: precision.buffer_dtype for name in spec.buffers.values() if name is not None})
    return CallPrecision(_effective_precision(plan.precision, 0, apply), buffer_dtypes, frozenset(full_precision))


def effective_unit(unit: UnitPlan, apply: Functional) -> UnitPlan:
    """Return the unit as it runs: in full precision if its module evaluates and its precision asks for that."""
    index = apply.skeleton.find(unit.name) or 0
    unchanged = _effective_precision(unit.precision, index, apply) is unit.precision
    return unit if unchanged else unit.in_full_precision()


def _effective_precision(precision: MixedPrecision | None, index: int, apply: Functional) -> MixedPrecision | None:
    """Return the precision that a module runs in, which is ``None`` in evaluation mode with ``full_precision_in_eval``."""
    training = apply.skeleton.specs[index].attributes["training"] if apply.training is None else apply.training
    return None if precision is None or (precision.full_precision_in_eval and not training) else precision


def forward_in_full_precision(module: nn.Module, forward: Callable[[Any, Any], Any], args: Any, kwargs: Any) -> Any:
    """Run a module that is no unit in the widest dtype of its buffers and of the parameters of units inside it."""
    own = [t.dtype for t in (*module.parameters(), *module.buffers(recurse=False)) if t.is_floating_point()]
    return run_in_full_precision(
        max(own, key=lambda dtype: dtype.itemsize, default=torch.float32), forward, (args, kwargs), {}
    )


# --- compilation ---------------------------------------------------------------------------------------------------------


def check_compiler(compiler: Any) -> None:
    """Raise unless ``compiler`` is a function that this torch can run in this thread."""
    if not callable(compiler):
        raise TypeError(f"compiler must be a function such as torch.compile; found {compiler!r}")
    if torch.__version__ < "2.13" and threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"torch before 2.13 crashes the process when several threads compile, as simulated ranks do; found "
            f"{torch.__version__}: leave compiler out in simulations, or install a newer torch"
        )


def compile_units(
    apply: Functional, units: Mapping[str, int], full_precision: Collection[int], compiler: Compiler
) -> dict[str, Callable[..., Any]]:
    """Compile the forward of each unit that contains no other unit and no full-precision module.

    A compiled forward contains nothing of this library: its graph is that of a plain module, with the leaves as arguments.
    Units of one class share one compiled forward.

    Arguments:
        apply: the function of the whole model, whose method the root unit runs.
        units: name of each unit -> index of its module.
        full_precision: indices of modules that run in full precision without being units.
        compiler: the function that compiles a forward.

    Returns:
        ``{name of a unit: compiled forward}`` for the units that are compiled; a compiled forward takes the module and its
        inputs.
    """
    inner = {*units, *(path for path, index in apply.skeleton.paths().items() if index in full_precision)}
    chosen: dict[str, tuple[Callable[..., Any], type[nn.Module]]] = {}
    for name, index in units.items():
        cls = apply.skeleton.specs[index].cls
        method = inspect.getattr_static(cls, "forward" if name else apply.method_name, None)
        innermost = not any(other != name and tree.is_under(other, name) for other in inner)
        if innermost and isinstance(method, types.FunctionType):
            chosen[name] = (method, cls)
    functions = {key: _compile_forward(*key, compiler) for key in dict.fromkeys(chosen.values())}
    return {name: functions[key] for name, key in chosen.items()}


def _compile_forward(forward: Callable[..., Any], cls: type[nn.Module], compiler: Compiler) -> Callable[..., Any]:
    compiled = compiler(forward)

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if transforms_active():
            # Why not compiled: a torch.func transform makes Dynamo give up the function's code, for later calls too.
            return forward(module, *args, **kwargs)
        # Why the user's class: Dynamo's guards compare the class of a module, not the object. The class of a unit differs
        # between sharded functions, and each one would compile the forward again.
        own, module.__class__ = module.__class__, cls
        try:
            return compiled(module, *args, **kwargs)
        finally:
            module.__class__ = own

    return run
