"""Policies that choose units: from a module to a list of paths.

Example:
    >>> import torch, funcshard as fs
    >>> fs.wrap.by_class(torch.nn.Linear)(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    ['0']
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

__all__ = ["Policy", "always", "any_of", "by_class", "by_function", "by_size"]

Policy = Callable[[nn.Module], list[str]]


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

    def policy(module: nn.Module) -> list[str]:
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

    def policy(module: nn.Module) -> list[str]:
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
        return [name for m, name in names.items() if m in chosen]

    return policy


def by_function(function: Callable[[nn.Module], bool]) -> Policy:
    """Choose every module with parameters for which ``function(module)`` is true.

    Arguments:
        function: from a module to whether it is a unit.

    Returns:
        A policy; see ``by_class``.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 9))
        >>> fs.wrap.by_function(lambda m: getattr(m, "out_features", 0) > 5)(net)
        ['1']

    Source: ``torch.distributed.fsdp.wrap.CustomPolicy``.
    """

    def policy(module: nn.Module) -> list[str]:
        named = module.named_modules()
        return [name for name, m in named if name and function(m) and next(m.parameters(), None) is not None]

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
        policies: policies of this module.

    Returns:
        A policy; see ``by_class``.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        >>> fs.wrap.any_of(fs.wrap.by_class(torch.nn.Linear), fs.wrap.by_class(torch.nn.LayerNorm))(net)
        ['0', '1']
    """

    def policy(module: nn.Module) -> list[str]:
        chosen = {name for choose in policies for name in choose(module)}
        return [name for name, _ in module.named_modules() if name in chosen]

    return policy


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
