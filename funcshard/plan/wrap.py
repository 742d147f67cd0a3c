"""Policies that choose units: from a module to a list of paths.

Example:
    >>> import torch, funcshard as fs
    >>> fs.wrap.by_class(torch.nn.Linear)(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    ['0']
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

__all__ = ["Policy", "Units", "always", "any_of", "by_class", "by_function", "by_size"]


class Units(list[str]):
    """A list of unit paths, as policies return it, with what single units override.

    Attributes:
        overrides: path -> options of that unit, such as ``{"strategy": "shard_grad_op"}``.

    Example:
        >>> import torch, funcshard as fs
        >>> choose = lambda m: {"strategy": "no_shard"} if isinstance(m, torch.nn.Linear) else False
        >>> units = fs.wrap.by_function(choose)(torch.nn.Sequential(torch.nn.Linear(2, 2)))
        >>> units, units.overrides
        (['0'], {'0': {'strategy': 'no_shard'}})
    """

    def __init__(self, paths: Iterable[str] = (), overrides: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__(paths)
        self.overrides = dict(overrides or {})


Policy = Callable[[nn.Module], Units]


def by_class(*classes: type[nn.Module]) -> Policy:
    """Choose every module of the given classes, subclasses included.

    Arguments:
        classes: one or more module classes.

    Returns:
        A policy: ``policy(module)`` -> paths of units, outer modules before inner ones, the root itself never among them.

    Raises:
        TypeError: no class was given, or something else. From the policy:
        ValueError: the module has no module of these classes with parameters.

    Example:
        >>> import torch, funcshard as fs
        >>> fs.wrap.by_class(torch.nn.Linear)(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
        ['0']

    Source: ``torch.distributed.fsdp.wrap.ModuleWrapPolicy``.
    """
    if not classes or not all(isinstance(cls, type) and issubclass(cls, nn.Module) for cls in classes):
        raise TypeError(f"by_class takes one or more subclasses of torch.nn.Module; found {classes}")

    def policy(module: nn.Module) -> Units:
        units = by_function(lambda m: isinstance(m, classes))(module)
        if not units:
            names = ", ".join(cls.__name__ for cls in classes)
            present = ", ".join(sorted({type(m).__name__ for m in module.modules()})[:8])
            raise ValueError(f"by_class({names}) found no such module with parameters; the model is made of {present}")
        return units

    return policy


def by_size(
    min_numel: int,
    *,
    exclude: tuple[type[nn.Module], ...] = (nn.ModuleList, nn.ModuleDict),
    force_leaf: tuple[type[nn.Module], ...] = (nn.MultiheadAttention,),
) -> Policy:
    """Choose modules from the inside out, as soon as what they hold, less what was chosen inside, is large enough.

    Arguments:
        min_numel: least number of parameter elements of a unit.
        exclude: classes that are never units themselves, their children may be.
        force_leaf: classes whose insides are never looked at.

    Returns:
        A policy; see ``by_class``.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(*[torch.nn.Linear(5, 5) for _ in range(2)], torch.nn.Linear(9, 9))
        >>> fs.wrap.by_size(40)(net)
        ['2']

    Source: ``torch.distributed.fsdp.wrap.size_based_auto_wrap_policy``.
    """

    def policy(module: nn.Module) -> Units:
        names = {id(m): name for name, m in module.named_modules()}
        chosen: dict[int, None] = {}

        def visit(m: nn.Module) -> int:
            """Choose below ``m`` and ``m`` itself; return the elements that chosen units below it hold."""
            total = _numel(m)
            taken = 0
            if total >= min_numel and not isinstance(m, force_leaf):
                taken = sum(visit(child) for child in dict.fromkeys(m.children()))
            if total - taken >= max(min_numel, 1) and not isinstance(m, (*exclude, *force_leaf)) and m is not module:
                chosen[id(m)] = None
                return total
            return taken

        visit(module)
        return Units(name for m, name in names.items() if m in chosen)

    return policy


def by_function(function: Callable[[nn.Module], bool | Mapping[str, Any]]) -> Policy:
    """Choose every module with parameters for which ``function(module)`` is true, or says what the unit overrides.

    Arguments:
        function: from a module to whether it is a unit, or to a dictionary of what this unit overrides of the plan:
            ``{"strategy": ..., "offload": ...}``.

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
        chosen: dict[str, Mapping[str, Any]] = {}
        for name, m in module.named_modules():
            answer = function(m) if name and next(m.parameters(), None) is not None else False
            if isinstance(answer, Mapping) or answer:
                chosen[name] = answer if isinstance(answer, Mapping) else {}
        return Units(chosen, {name: options for name, options in chosen.items() if options})

    return policy


def always() -> Policy:
    """Choose every module that has parameters.

    Returns:
        A policy; see ``by_class``. Containers without a forward (ModuleList, ModuleDict) are left out.

    Example:
        >>> import torch, funcshard as fs
        >>> fs.wrap.always()(torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.ReLU()))
        ['0', '0.0']

    Source: ``torch.distributed.fsdp.wrap.always_wrap_policy``.
    """
    return by_function(lambda m: not isinstance(m, (nn.ModuleList, nn.ModuleDict)))


def any_of(*policies: Policy) -> Policy:
    """Choose what any of the given policies chooses.

    Arguments:
        policies: policies of this module; where two override one unit, the first counts.

    Returns:
        A policy; see ``by_class``.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        >>> fs.wrap.any_of(fs.wrap.by_class(torch.nn.Linear), fs.wrap.by_class(torch.nn.LayerNorm))(net)
        ['0', '1']
    """

    def policy(module: nn.Module) -> Units:
        chosen = [choose(module) for choose in policies]
        names = {name for units in chosen for name in units}
        overrides = {name: options for units in reversed(chosen) for name, options in units.overrides.items()}
        return Units((name for name, _ in module.named_modules() if name in names), overrides)

    return policy


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
