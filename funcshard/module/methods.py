"""Methods of a unit's module besides ``forward`` that gather the unit.

A unit is gathered when its module's ``forward`` is called. ``fully_shard(..., methods=...)`` names
further methods, such as the ``encode`` and ``decode`` of an autoencoder. The module gets a subclass
of its class, in which these methods run through the unit as its ``forward`` does.

While one of them runs, the unit is gathered. So a method that calls another one, or ``forward``, of
the same module does not gather the unit again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from funcshard.module.functional import Functional
from funcshard.module.subclasses import with_methods

__all__ = ["entering_once", "read_methods", "with_unit_methods"]

Enter = Callable[..., Any]  # of a module, its forward, args and kwargs


def read_methods(methods: Any, apply: Functional, units: Mapping[str, int]) -> dict[int, tuple[str, ...]]:
    """Return the names of the methods by index of the module, after checking them.

    Arguments:
        methods: the option of ``fully_shard``.
        apply: the function of the module.
        units: path of the module of each unit -> its index in the skeleton.

    Raises:
        TypeError: ``methods`` is no dictionary from paths to lists of names.
        ValueError: it names a module that is no unit, the root, or a method that cannot run through
            the unit.
    """
    if not isinstance(methods, Mapping):
        raise TypeError(
            f"methods must be a dictionary from units to lists of method names; found {methods!r}: write "
            f"{{'encoder': ['encode']}}"
        )
    found: dict[int, tuple[str, ...]] = {}
    for path, names in methods.items():
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise TypeError(f"the methods of {path!r} must be a list of names; found {names!r}: write [{names!r}]")
        if path == "":
            raise ValueError(
                "methods are those of units inside the model; found those of the root '': call "
                "fully_shard(apply.method(name), plan, mesh) for a method of the whole model"
            )
        if path not in units:
            raise ValueError(
                f"methods must name units of the plan, which are gathered for them; found {path!r}; its units are "
                f"{[name for name in units if name][:6]}: make the module a unit, or let the unit around it call the method"
            )
        cls = apply.skeleton.specs[units[path]].cls
        names = tuple(dict.fromkeys(names))
        for name in names:
            method = inspect.getattr_static(cls, name, None) if isinstance(name, str) else None
            if name == "forward" or not isinstance(method, types.FunctionType):
                what = "forward, which gathers the unit in any case" if name == "forward" else f"no such method: {name!r}"
                raise ValueError(
                    f"methods of {path!r} must be methods that the class {cls.__name__} defines, besides forward; found "
                    f"{what}; leave it out, or name one of {_own_methods(cls)[:6]}"
                )
        found[units[path]] = names
    return found


def with_unit_methods(apply: Functional, methods: Mapping[int, tuple[str, ...]]) -> Functional:
    """Return the function of the same module, in which ``methods`` run through their units."""
    if not methods:
        return apply
    specs = list(apply.skeleton.specs)
    for index, names in methods.items():
        cls = specs[index].cls
        wrapped = {name: _ThroughUnit(getattr(cls, name)) for name in names}
        specs[index] = dataclasses.replace(specs[index], cls=with_methods(cls, wrapped))
    return dataclasses.replace(apply, skeleton=dataclasses.replace(apply.skeleton, specs=tuple(specs)))


def entering_once(enter: Enter) -> Enter:
    """Return ``enter``, but let a module that is inside run its methods and forward as they are."""

    def enter_first(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        state = module.__dict__

        # Why around forward: backward may run forward again, without this function.
        def inside(args: Any, kwargs: Any) -> Any:
            state["_funcshard_inside"] = True
            try:
                return forward(args, kwargs)
            finally:
                del state["_funcshard_inside"]

        return enter(module, inside, args, kwargs)

    return enter_first


class _ThroughUnit:
    """A method that runs through the unit, unless the module is inside one of its methods.

    A checkpoint inside a method calls a bound method again from backward. So the lookup decides.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        @functools.wraps(method)
        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.__dict__["_funcshard_run"](self, lambda args, kwargs: method(self, *args, **kwargs), args, kwargs)

        self.method, self.run = method, run

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Callable[..., Any]:
        if module is None:
            return self.method
        return types.MethodType(self.method if "_funcshard_inside" in module.__dict__ else self.run, module)


def _own_methods(cls: type[nn.Module]) -> list[str]:
    """Return the names of the methods that a class has besides those of ``nn.Module``."""
    names = [name for name in dir(cls) if not name.startswith("_") and name != "forward" and not hasattr(nn.Module, name)]
    return [name for name in names if isinstance(inspect.getattr_static(cls, name), types.FunctionType)]
