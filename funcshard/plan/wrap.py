"""Policies that choose the units of a module: functions from a module to a list of paths.

Example:
    >>> import torch, funcshard as fs
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> fs.wrap.by_class(torch.nn.Linear)(net)
    ['0']
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from funcshard._utils.options import check_count
from funcshard._utils.tree import tensors_in

__all__ = ["Policy", "Units", "always", "any_of", "by_class", "by_function", "by_size"]


class Units(list[Any]):
    """A list of unit paths, with the options that single units override.

    A list or tuple of paths in it is a group: one unit. ``units + other`` keeps the overrides of
    both; those of ``units`` hold if both override options of one unit.

    Attributes:
        overrides: options of ``make_plan``, such as ``{"strategy": "shard_grad_op"}``, by path of a
            unit (``""`` for the root) or tuple of the paths of a group.

    Example:
        >>> import torch, funcshard as fs
        >>> choose = lambda m: {"strategy": "no_shard"} if isinstance(m, torch.nn.Linear) else False
        >>> units = fs.wrap.by_function(choose)(torch.nn.Sequential(torch.nn.Linear(2, 2)))
        >>> units, units.overrides
        (['0'], {'0': {'strategy': 'no_shard'}})
    """

    def __init__(
        self,
        paths: Iterable[str | Sequence[str]] = (),
        overrides: Mapping[Any, Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(paths)
        # A copy, because lists of units are added and changed.
        self.overrides = dict(overrides or {})

    def __add__(self, other: Sequence[Any]) -> Units:
        return Units([*self, *other], {**getattr(other, "overrides", {}), **self.overrides})


Policy = Callable[[nn.Module], Units]
"""A policy: a function from a module to its units. ``make_plan(units=...)`` takes its result."""


def by_class(*classes: type[nn.Module]) -> Policy:
    """Choose every module of your classes, subclasses included.

    Arguments:
        classes: one or more module classes.

    Returns:
        A policy: ``policy(module)`` returns the paths of the units, outer modules before inner
        ones. It never chooses ``module`` itself.

    Raises:
        TypeError: no class is given, or an argument is not a module class.
        ValueError: raised by the policy if ``module`` has no such module with parameters.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> fs.wrap.by_class(torch.nn.Linear)(net)
        ['0']

    Source: ``torch.distributed.fsdp.wrap.ModuleWrapPolicy``.
    """
    # Why the class: a module prints its whole tree.
    wrong_names = [
        getattr(cls, "__name__", type(cls).__name__)
        for cls in classes
        if not isinstance(cls, type) or not issubclass(cls, nn.Module)
    ]
    if wrong_names or not classes:
        raise TypeError(
            "by_class takes one or more subclasses of torch.nn.Module; found "
            f"{', '.join(wrong_names) or 'none'}: write by_class(A, B)(module), with the classes "
            "themselves"
        )

    def policy(module: nn.Module) -> Units:
        units = by_function(lambda m: isinstance(m, classes))(module)
        # An empty choice is a typo in most cases, and the plan would have one large unit.
        if not units:
            class_names = ", ".join(cls.__name__ for cls in classes)
            present_classes = ", ".join(
                sorted({type(m).__name__ for m in module.modules()})[:8]
            )
            raise ValueError(
                f"by_class({class_names}) found no such module with parameters; the model is made "
                f"of {present_classes}"
            )
        return units

    return policy


def by_size(
    min_numel: int,
    *,
    exclude: tuple[type[nn.Module], ...] = (nn.ModuleList, nn.ModuleDict),
    force_leaf: tuple[type[nn.Module], ...] = (nn.MultiheadAttention,),
) -> Callable[..., Units]:
    """Choose modules by size, from the inside out.

    The policy chooses a module with at least ``min_numel`` parameter elements outside of the units
    inside it.

    A module may read a parameter of its child without calling the child, as in
    ``F.linear(x, self.qkv.weight)``. The two have to be one unit, which no size tells. If your
    module does, pass example inputs: one forward of a copy finds such pairs.

    Arguments:
        min_numel: least number of parameter elements of a unit.
        exclude: classes whose modules never become units; modules inside them may.
        force_leaf: classes whose modules never become units, and neither do modules inside them.

    Returns:
        A policy; see ``by_class``. ``policy(module, inputs)`` takes a tuple of arguments, a
        dictionary of keyword arguments, or the only argument.

    Raises:
        TypeError: ``min_numel`` isn't a number, or an argument is not a tuple of classes.
        ValueError: ``min_numel`` is negative or not whole.

    Example:
        >>> import torch, funcshard as fs
        >>> small = [torch.nn.Linear(5, 5) for _ in range(2)]
        >>> net = torch.nn.Sequential(*small, torch.nn.Linear(9, 9))
        >>> fs.wrap.by_size(40)(net)
        ['2']

    Source: ``torch.distributed.fsdp.wrap.size_based_auto_wrap_policy``.
    """

    min_numel = check_count(
        "min_numel",
        min_numel,
        0,
        of="elements",
        remedy="pass 0 to choose every module with parameters",
    )
    for option, classes in (("exclude", exclude), ("force_leaf", force_leaf)):
        if not isinstance(classes, tuple) or not all(
            isinstance(cls, type) for cls in classes
        ):
            raise TypeError(
                f"{option} must be a tuple of module classes; found {classes!r}: write "
                "(torch.nn.Linear,)"
            )

    def policy(module: nn.Module, example_inputs: Any = None) -> Units:
        module_names = {id(m): name for name, m in _named_modules(module)}
        excluded_ids = {id(module)}
        if example_inputs is not None:
            excluded_ids |= read_outside(module, example_inputs)
        no_units = (*exclude, *force_leaf)
        excluded_ids |= {id(m) for m in module.modules() if isinstance(m, no_units)}
        chosen_units: set[int] = set()
        _choose_by_size(module, min_numel, force_leaf, excluded_ids, chosen_units)
        return Units(name for m, name in module_names.items() if m in chosen_units)

    return policy


# Why no function inside of the policy: it would refer to itself and to the module, which would stay
# in memory until Python looks for such garbage.
def _choose_by_size(
    module: nn.Module,
    min_numel: int,
    force_leaf: tuple[type[nn.Module], ...],
    apart: Collection[int],
    chosen: set[int],
) -> int:
    """Choose units in a module, maybe the module itself; return how many elements they hold."""
    total_numel = sum(parameter.numel() for parameter in module.parameters())
    taken_numel = 0
    if total_numel >= min_numel and not isinstance(module, force_leaf):
        # Why unique: a module may be registered twice under one parent.
        for child in dict.fromkeys(module.children()):
            taken_numel += _choose_by_size(child, min_numel, force_leaf, apart, chosen)
    if total_numel - taken_numel < max(min_numel, 1) or id(module) in apart:
        return taken_numel
    chosen.add(id(module))
    return total_numel


def by_function(function: Callable[[nn.Module], bool | Mapping[str, Any]]) -> Policy:
    """Choose every module with parameters for which ``function(module)`` is true or a dictionary.

    Arguments:
        function: your function from a module to a truth value, or to a dictionary, maybe empty, of
            the options of ``make_plan`` that this unit overrides.

    Returns:
        A policy; see ``by_class``.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 9))
        >>> fs.wrap.by_function(lambda m: getattr(m, "out_features", 0) > 5)(net)
        ['1']

    Source: ``torch.distributed.fsdp.wrap.CustomPolicy``.
    """

    def policy(module: nn.Module) -> Units:
        chosen_units: dict[str, Mapping[str, Any]] = {}
        for name, m in _named_modules(module):
            # Neither the root nor a module without parameters can be a unit.
            if not name or next(m.parameters(), None) is None:
                continue
            unit_answer = function(m)
            if isinstance(unit_answer, Mapping):
                chosen_units[name] = unit_answer
            elif unit_answer:
                chosen_units[name] = {}
        return Units(
            chosen_units,
            {name: options for name, options in chosen_units.items() if options},
        )

    return policy


def always() -> Policy:
    """Choose every module that has parameters.

    Returns:
        A policy; see ``by_class``. It skips containers without a forward (ModuleList, ModuleDict).

    Example:
        >>> import torch, funcshard as fs
        >>> block = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> fs.wrap.always()(torch.nn.Sequential(block, torch.nn.ReLU()))
        ['0', '0.0']

    Source: ``torch.distributed.fsdp.wrap.always_wrap_policy``.
    """
    return by_function(lambda m: not isinstance(m, (nn.ModuleList, nn.ModuleDict)))


def any_of(*policies: Policy) -> Policy:
    """Choose every module that one of your policies chooses.

    Arguments:
        policies: policies such as those of ``fs.wrap``. If two override options of one unit, the
            first one counts.

    Returns:
        A policy; see ``by_class``.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        >>> linears = fs.wrap.by_class(torch.nn.Linear)
        >>> norms = fs.wrap.by_class(torch.nn.LayerNorm)
        >>> fs.wrap.any_of(linears, norms)(net)
        ['0', '1']
    """

    for choose in policies:
        if not callable(choose):
            raise TypeError(
                f"any_of takes policies, each an argument of its own; found {choose!r}: write "
                "any_of(*policies)"
            )

    def policy(module: nn.Module) -> Units:
        # Note: a policy of the user's may return a plain list.
        chosen_units = sum([choose(module) for choose in policies], start=Units())
        entries = dict.fromkeys(x if isinstance(x, str) else tuple(x) for x in chosen_units)
        module_names = [name for name, _ in _named_modules(module) if name in entries]
        unit_groups = [
            unit_entry for unit_entry in entries if not isinstance(unit_entry, str)
        ]
        return Units([*module_names, *unit_groups], chosen_units.overrides)

    return policy


def _named_modules(module: Any) -> list[tuple[str, nn.Module]]:
    if not isinstance(module, nn.Module):
        raise TypeError(
            "a policy takes the torch.nn.Module whose units it chooses; found "
            f"{type(module).__name__}: write policy(module)"
        )
    return list(module.named_modules())


# --- parameters that other code reads -------------------------------------------------------------


def read_outside(module: nn.Module, inputs: Any) -> set[int]:
    """Return the ids of the modules of which a parameter is read while their forward does not run.

    Arguments:
        module: the module; one forward of a copy, which shares its parameters, runs.
        inputs: a tuple of arguments, a dictionary of keyword arguments, or the only argument.
    """
    holder_ids: dict[int, set[int]] = {}
    for inner_module in module.modules():
        for parameter in inner_module.parameters():
            holder_ids.setdefault(id(parameter), set()).add(id(inner_module))
    # Why a memo: the copy shares the parameters, so their ids lead back to the module. Tensors that
    # hooks compute from them, as of pruning, can't be copied.
    computed = [
        t for m in module.modules() for t in tensors_in(m.__dict__) if t.grad_fn is not None
    ]
    clone_root = copy.deepcopy(
        module, {id(t): t for t in (*module.parameters(), *computed)}
    )
    running_ids: list[int] = []
    for inner_module, cloned_module in zip(
        module.modules(), clone_root.modules(), strict=True
    ):
        # Why forward and no hooks: a unit is gathered in its forward, and its hooks run outside.
        cloned_module.forward = _noting(
            running_ids, id(inner_module), cloned_module.forward
        )
    args, kwargs = (), {}
    if isinstance(inputs, Mapping):
        kwargs = dict(inputs)
    else:
        args = inputs if isinstance(inputs, tuple) else (inputs,)
    reads_mode = _Reads(holder_ids, running_ids)
    # Why with gradients: without them, torch's transformer layers read the parameters of their
    # children, and fully_shard keeps them from that.
    with torch.random.fork_rng(), torch.enable_grad(), reads_mode:
        clone_root(*args, **kwargs)
    return reads_mode.outside


def _noting(
    running: list[int], number: int, forward: Callable[..., Any]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        running.append(number)
        try:
            return forward(*args, **kwargs)
        finally:
            running.pop()

    return run


class _Reads(TorchFunctionMode):
    """Notes which modules' parameters an operation reads while these modules do not run."""

    def __init__(self, holders: Mapping[int, set[int]], running: Iterable[int]) -> None:
        super().__init__()
        self.holders, self.running = holders, running
        self.outside: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        read_tensors = [
            tensor for tensor in tensors_in((args, kwargs)) if id(tensor) in self.holders
        ]
        # Why the results: a shape or a device is no tensor, and a placeholder has them too.
        if read_tensors and any(
            all(result is not tensor for tensor in read_tensors)
            for result in tensors_in((out,))
        ):
            for tensor in read_tensors:
                self.outside |= self.holders[id(tensor)].difference(self.running)
        return out
