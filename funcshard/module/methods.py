"""The methods of a unit's module that gather the unit: ``forward``, and those of ``methods=``.

A unit is gathered when its module's ``forward`` is called. ``fully_shard(..., methods=...)`` names
further methods, such as the ``encode`` and ``decode`` of an autoencoder. During a call, attributes
of the module object hide these methods of its class, which stays as it is (``UnitEntry``).

While one of them runs, the unit is gathered, and the object has no such attributes. So a method
that calls another one, or ``forward``, of the same module does not gather the unit again, and
neither does a checkpoint inside the method, which calls another one again from backward.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from funcshard.module.functional import Functional

__all__ = ["UnitEntry", "UnitMethods", "read_methods", "through_unit"]

UnitMethods = Mapping[str, Callable[..., Any]]  # name -> the method that runs through the unit


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
            what = "" if isinstance(method, types.FunctionType) else f"no such method: {name!r}"
            if name == "forward":
                what = "forward, which gathers the unit in any case"
            elif what == "" and name.startswith("__") and name.endswith("__"):
                what = f"{name}, which Python looks up on the class"
            if what:
                raise ValueError(
                    f"methods of {path!r} must be methods that the class {cls.__name__} defines, besides forward; found "
                    f"{what}; leave it out, or name one of {_own_methods(cls)[:6]}"
                )
        found[units[path]] = names
    return found


def through_unit(cls: type[nn.Module], name: str, compiled: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a method that runs a method of ``cls`` through the unit of the module.

    Arguments:
        cls: the class.
        name: the name of the method.
        compiled: what runs in place of the class's method.
    """

    @functools.wraps(getattr(cls, name))
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        module: Any = self() if type(self) is weakref.ref else self

        # Why around the method: backward may run it again, without entering the unit here.
        def inside(args: Any, kwargs: Any) -> Any:
            with _as_made(module):
                if compiled is None or name in module.__dict__:
                    return getattr(module, name)(*args, **kwargs)
                return compiled(module, *args, **kwargs)

        entry = module.__dict__.get(_ENTRY)
        return inside(args, kwargs) if entry is None else entry.enter(module, inside, args, kwargs)

    return run


@dataclass(slots=True, eq=False)
class UnitEntry:
    """How a module of one call enters its unit.

    Attributes:
        enter: runs a method in the unit; a function of the module, the method, args and kwargs.
        methods: the methods that enter the unit.
        hidden: what the user set on the module object in place of these methods.
    """

    enter: Callable[..., Any]
    methods: UnitMethods
    hidden: dict[str, Any] = field(default_factory=dict)

    def begin(self, module: nn.Module) -> None:
        """Let the methods of ``module`` enter the unit."""
        state = module.__dict__
        self.hidden = {name: state.pop(name) for name in self.methods if name in state}
        state.update({name: types.MethodType(method, module) for name, method in self.methods.items()})
        state[_ENTRY] = self

    def end(self, module: nn.Module) -> None:
        """Let the methods refer to ``module`` weakly, so that it is freed without ``gc``.

        Why not from the beginning: a checkpoint may keep the forward of a unit for backward, and
        nothing else of the unit.
        """
        state = module.__dict__
        for name, method in self.methods.items():
            if getattr(state.get(name), "__func__", None) is method:
                state[name] = types.MethodType(method, weakref.ref(module))


_ENTRY = "_funcshard_entry"  # the key of the entry in the module's __dict__


@contextlib.contextmanager
def _as_made(module: nn.Module) -> Iterator[None]:
    """Within this context, the object is as the user made it."""
    state = module.__dict__
    entry = state.pop(_ENTRY, None)
    if entry is None:
        yield  # it is already
        return
    outside = {name: state.pop(name) for name in entry.methods if name in state}
    state.update(entry.hidden)
    try:
        yield
    finally:
        entry.hidden = {name: state.pop(name) for name in entry.methods if name in state}
        state.update(outside)
        state[_ENTRY] = entry


def _own_methods(cls: type[nn.Module]) -> list[str]:
    """Return the names of the methods that a class has besides those of ``nn.Module``."""
    names = [name for name in dir(cls) if not name.startswith("_") and name != "forward" and not hasattr(nn.Module, name)]
    return [name for name in names if isinstance(inspect.getattr_static(cls, name), types.FunctionType)]
