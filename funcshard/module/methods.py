"""The option ``methods=`` of ``fully_shard``: methods besides ``forward`` that gather a unit.

A unit is gathered when its module's ``forward`` is called. The option names further methods, such
as the ``encode`` and ``decode`` of an autoencoder; ``UnitEntry`` lets them enter the unit.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Mapping, Sequence
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
    paths = [path for path in units if path]
    _validate(methods, paths)
    names_by_index: dict[int, tuple[str, ...]] = {}
    for path in paths:
        entry = last_match(methods, path)
        if entry is not None:
            names = tuple(dict.fromkeys(methods[entry]))
            _check_names(path, apply.skeleton.specs[units[path]].cls, names)
            names_by_index[units[path]] = names
    return names_by_index


def _validate(methods: Any, paths: Sequence[str]) -> None:
    """Raise unless ``methods`` is a dictionary from units to lists."""
    if not isinstance(methods, Mapping):
        raise TypeError(
            f"methods must be a dictionary from units to lists of method names; found {methods!r}: "
            f"write {{'encoder': ['encode']}}"
        )
    for entry, names in methods.items():
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise TypeError(
                f"the methods of {entry!r} must be a list of names; found {names!r}: write "
                f"[{names!r}]"
            )
        if not any(matches(entry, path) for path in paths):
            raise ValueError(
                f"methods must name units of the plan inside the model; found {entry!r}; its units "
                f"are {paths[:6]}: make the module a unit, or, for a method of the whole model, "
                "call fully_shard(apply.method(name), plan, mesh)"
            )


def _check_names(path: str, cls: type[nn.Module], names: Sequence[str]) -> None:
    """Raise unless all names are those of methods that can enter a unit of class ``cls``."""
    methods = [
        name
        for name in dir(cls)
        if isinstance(inspect.getattr_static(cls, name), types.FunctionType)
        and name != "forward"
        and not (name.startswith("__") and name.endswith("__"))
    ]
    wrong = next((name for name in names if name not in methods), None)
    if wrong is not None:
        own_names = [name for name in methods if name[0] != "_" and not hasattr(nn.Module, name)]
        raise ValueError(
            f"methods of {path!r} must be methods that the class {cls.__name__} defines, besides "
            f"forward and those that Python calls; found {wrong!r}; leave it out, or name one of "
            f"{own_names[:6]}"
        )
