"""The option ``methods=`` of ``fully_shard``: methods besides ``forward`` that gather a unit.

A unit is gathered when its module's ``forward`` is called. The option names further methods, such
as the ``encode`` and ``decode`` of an autoencoder; ``UnitEntry`` lets them enter the unit.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from funcshard.module.functional import Functional
from funcshard.plan import last_match, matches


def read_methods(
    methods: Any, apply: Functional, units: Mapping[str, int]
) -> dict[int, tuple[str, ...]]:
    """Return the names of the methods by index of the module, after checking them.

    Arguments:
        methods: the option of ``fully_shard``: by path or glob of units.
        apply: the function of the module.
        units: path of the module of each unit -> its index in the skeleton.

    Raises:
        TypeError: ``methods`` is no dictionary from paths to lists of names.
        ValueError: it names a module that is no unit, the root, or a method that cannot run through
            the unit.
    """
    if not isinstance(methods, Mapping):
        raise TypeError(
            f"methods must be a dictionary from units to lists of method names; found {methods!r}: "
            f"write {{'encoder': ['encode']}}"
        )
    paths = [path for path in units if path]
    for entry, names in methods.items():
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise TypeError(
                f"the methods of {entry!r} must be a list of names; found {names!r}: write "
                f"[{names!r}]"
            )
        if entry == "":
            raise ValueError(
                "methods are those of units inside the model; found those of the root '': call "
                "fully_shard(apply.method(name), plan, mesh) for a method of the whole model"
            )
        if not any(matches(entry, path) for path in paths):
            raise ValueError(
                "methods must name units of the plan, which are gathered for them; found "
                f"{entry!r}; its units are {paths[:6]}: make the module a unit, or let the unit "
                "around it call the method"
            )
    method_names: dict[int, tuple[str, ...]] = {}
    for path in paths:
        counts = last_match(methods, path)
        if counts is None:
            continue
        cls = apply.skeleton.specs[units[path]].cls
        names = tuple(dict.fromkeys(methods[counts]))
        for name in names:
            method = inspect.getattr_static(cls, name, None) if isinstance(name, str) else None
            refusal_text = (
                "" if isinstance(method, types.FunctionType) else f"no such method: {name!r}"
            )
            if name == "forward":
                refusal_text = "forward, which gathers the unit in any case"
            elif refusal_text == "" and name.startswith("__") and name.endswith("__"):
                refusal_text = f"{name}, which Python looks up on the class"
            if refusal_text:
                raise ValueError(
                    f"methods of {path!r} must be methods that the class {cls.__name__} defines, "
                    f"besides forward; found {refusal_text}; leave it out, or name one of "
                    f"{_own_methods(cls)[:6]}"
                )
        method_names[units[path]] = names
    return method_names


def _own_methods(cls: type[nn.Module]) -> list[str]:
    """Return the names of the methods that a class has besides those of ``nn.Module``."""
    names = [
        name
        for name in dir(cls)
        if not name.startswith("_") and name != "forward" and not hasattr(nn.Module, name)
    ]
    return [
        name for name in names if isinstance(inspect.getattr_static(cls, name), types.FunctionType)
    ]
