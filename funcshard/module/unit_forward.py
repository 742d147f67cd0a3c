"""What a plan's precision means for a module in training or evaluation, which may be in full precision.

Inside a unit's module: its class for a call, and the leaves in their places while its forward runs.

Which units are compiled, and how a compiled forward runs on the module objects of a call.
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
from funcshard.core import Again, run_in_full_precision, running
from funcshard.module.functional import Functional
from funcshard.module.skeleton import Skeleton
from funcshard.plan import MixedPrecision, Plan, UnitPlan, is_one_of

__all__ = [
    "Classes",
    "Compiler",
    "Modes",
    "Places",
    "check_compiler",
    "compiled",
    "in_full_precision",
    "in_mode",
    "modes_of",
    "places_of",
    "unit_class",
    "with_leaves",
    "with_method",
]


@dataclass(frozen=True, slots=True, eq=False)
class Modes:
    """What is cast around a call besides parameters.

    Attributes:
        precision: what says how the inputs of the whole model are cast, where the root owns nothing that would.
        buffers: names of the buffers that are cast, and to what.
        full_precision: numbers of modules that compute in full precision and are no units, because they have no parameters, or
            units inside them have all.
    """

    precision: MixedPrecision | None
    buffers: dict[str, torch.dtype]
    full_precision: frozenset[int]

    def cast(self, buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a call's own buffers in the dtypes that it computes in; ``restore`` is the inverse."""
        meant = {name: dtype for name, dtype in self.buffers.items() if buffers[name].is_floating_point()}
        return {name: b.to(meant[name]) if name in meant else b for name, b in buffers.items()}

    def restore(self, buffers: dict[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the buffers that a call left behind in the dtypes of those that it was given."""
        return {name: b.to(given[name].dtype) if name in self.buffers else b for name, b in buffers.items()}


def in_mode(unit: UnitPlan, apply: Functional) -> UnitPlan:
    """The unit as it runs: in full precision where its module is in evaluation mode and its precision says so."""
    number = apply.skeleton.find(unit.name)
    return unit if _holds(unit.precision, number or 0, apply) is unit.precision else unit.in_full_precision()


def modes_of(plan: Plan, apply: Functional) -> Modes:
    """Return what is cast around a call of ``apply``, planned by ``plan``.

    Raises:
        ValueError: a module that should compute in full precision has its parameters in a unit that does not.
    """
    skeleton = apply.skeleton
    units = plan.units
    full_precision: list[int] = []
    full: list[str] = [unit.name for unit in plan.unit_list if unit.full_precision]
    buffers: dict[str, torch.dtype] = {}
    exact = {leaf.path for unit in plan.unit_list if unit.precision is None for leaf in unit.leaves}
    lower = [place for leaf, places in skeleton.parameters.items() if leaf not in exact for place in places]
    for path, number in skeleton.paths().items():
        owner = max((name for name in ("", *units) if tree.is_under(path, name)), key=len)
        precision = units[owner].precision if owner in units else plan.precision
        if precision is None or any(tree.is_under(path, outer) for outer in full):
            continue
        part = skeleton.parts[number]
        if is_one_of(part.cls, precision.ignored_classes) and path:
            held = [place for place in lower if tree.is_under(place, path)]
            if held:
                raise ValueError(
                    f"module {path!r} is a {part.cls.__name__}, which ignored_classes wants in full precision, but its "
                    f"parameter {held[0]!r} is in unit {owner or '(root)'!r}, of lower precision: pass make_plan the params "
                    f"of make_functional as they are, or name the module among the units, with a precision of None"
                )
            full.append(path)
            full_precision.append(number)
        elif precision.buffer_dtype is not None and _holds(precision, number, apply) is not None:
            buffers.update({name: precision.buffer_dtype for name in part.buffers.values() if name is not None})
    return Modes(_holds(plan.precision, 0, apply), buffers, frozenset(full_precision))


def _holds(precision: MixedPrecision | None, number: int, apply: Functional) -> MixedPrecision | None:
    """The precision of a module in its mode."""
    training = apply.skeleton.parts[number].state["training"] if apply.training is None else apply.training
    return None if precision is None or (precision.full_precision_in_eval and not training) else precision


# a module's class -> a subclass of it that runs through a call's unit
Classes = dict[type[nn.Module], type[nn.Module]]


# where a unit's leaves stand below its module: names of modules to walk -> names in that module's table, leaf numbers
Places = tuple[tuple[tuple[str, ...], tuple[tuple[str, int], ...]], ...]


def places_of(unit: UnitPlan, skeleton: Skeleton) -> Places:
    """Return where the leaves of a unit stand below its module."""
    found: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for number, leaf in enumerate(unit.leaves):
        for place in skeleton.parameters[leaf.path]:
            *modules, name = place[len(unit.name) + 1 if unit.name else 0 :].split(".")
            found.setdefault(tuple(modules), []).append((name, number))
    return tuple((path, tuple(entries)) for path, entries in found.items())


def with_leaves(
    places: Places,
    leaves: list[torch.Tensor],
    module: nn.Module,
    forward: Callable[[Any, Any], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run ``forward`` with ``leaves`` in their places below ``module``, and take them out again."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    saved = running.get() if torch.is_grad_enabled() else None
    try:
        for path, entries in places:
            owner = module
            for name in path:
                owner = owner._modules[name]  # type: ignore[assignment]
            table = owner._parameters
            if saved is not None:
                before.append((owner.__dict__, "_parameters", Again(table, saved, dict(entries))))
                table = owner.__dict__["_parameters"] = dict(table)
            else:
                before += [(table, name, table[name]) for name, _ in entries]
            for name, number in entries:
                table[name] = leaves[number]  # type: ignore[assignment]
            if isinstance(owner, nn.RNNBase):
                before.append((owner.__dict__, "_flat_weights", []))  # where an RNN keeps its weights a second time
        return forward(args, kwargs)
    finally:
        for table, name, value in before:
            table[name] = value


def in_full_precision(module: nn.Module, forward: Callable[[Any, Any], Any], args: Any, kwargs: Any) -> Any:
    """Run a module that owns no parameters in the dtype of its buffers, and of what the units inside it own."""
    own = [t.dtype for t in (*module.parameters(), *module.buffers(recurse=False)) if t.is_floating_point()]
    return run_in_full_precision(
        max(own, key=lambda dtype: dtype.itemsize, default=torch.float32), forward, (args, kwargs), {}
    )


def unit_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``cls`` whose forward is the call's run of the unit around the forward of ``cls``."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__
        own = state.get("_funcshard_forward") or functools.partial(state.get("_funcshard_compiled") or cls.forward, self)
        return state["_funcshard_run"](self, lambda args, kwargs: own(*args, **kwargs), args, kwargs)

    return with_method(cls, "forward", forward)


def with_method(cls: type[nn.Module], name: str, method: Callable[..., Any]) -> type[nn.Module]:
    """A subclass of ``cls`` with another method under ``name``."""
    return type(cls.__name__, (cls,), {name: method, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


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
    apply: Functional, units: Mapping[str, int], full_precision: Collection[int], compiler: Compiler
) -> dict[str, Callable[..., Any]]:
    """Compile the forward of each unit that no other unit, and no full-precision module, is inside of; that of a class once.

    Arguments:
        apply: the function of the whole model; the root runs its method.
        units: the number of each unit's module, by the unit's name.
        full_precision: numbers of modules that run in full precision without being units.
        compiler: what compiles a function.

    Returns:
        ``{name of a unit: function of its module and inputs}``, without the units that stay as they are.
    """
    inner = {*units, *(path for path, number in apply.skeleton.paths().items() if number in full_precision)}
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
        if transforms_active():  # where Dynamo gives its code up, for later calls too
            return forward(module, *args, **kwargs)
        own, module.__class__ = module.__class__, cls  # what is compiled is for a class, and a unit's differs each time
        try:
            return fast(module, *args, **kwargs)
        finally:
            module.__class__ = own

    return run
