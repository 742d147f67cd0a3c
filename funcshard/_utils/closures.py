"""Walk the objects that a Python object refers to.

``captured`` follows only the references that a programmer writes: closures, defaults, partials and
plain containers. ``reachable`` also follows attributes, weak references and every other reference
that the garbage collector knows, and the global variables that a function's code names.
"""

from __future__ import annotations

import dis
import functools
import gc
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch


def captured(function: Any) -> Iterator[Any]:
    """Yield ``function`` and the objects that it captured.

    The walk follows closures, default arguments, ``functools.partial``, tuples, lists and the
    values of dictionaries. It does not enter modules, tensors or classes. It yields each object
    once.
    """
    return _walk(function, everything=False)


def reachable(value: Any) -> Iterator[Any]:
    """Yield ``value`` and every object that can be reached from it.

    The walk follows closures and default arguments of functions, weak references, and all
    references of other objects. It does not enter modules, tensors or classes. It yields each
    object once.

    Of the global variables that a function's code names, it follows modules, functions, methods and
    partials. A function that was found in a global variable of another file is entered, but its own
    global variables are not.
    """
    return _walk(value, everything=True)


def _walk(value: Any, *, everything: bool) -> Iterator[Any]:
    seen: set[int] = set()
    # Why: without a limit, the walk would go through all functions that a library's function calls.
    files: set[int] = set()  # the global variables of functions that were found without them
    in_globals: set[int] = set()
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        # Why type(found), and the iterators of built-in classes: an object of a user may raise in
        # __class__, as a proxy of a dead object does, in __iter__ and in __len__.
        kind = type(found)
        if issubclass(kind, (torch.nn.Module, torch.Tensor, type, types.ModuleType)):
            continue
        if issubclass(kind, types.FunctionType):
            # Why not gc.get_referents(found): a function refers to the globals of its file, and the
            # walk would go through everything that the file imports. An empty cell has no
            # referents.
            waiting += [each for cell in found.__closure__ or () for each in gc.get_referents(cell)]
            waiting += [found.__defaults__, found.__kwdefaults__]
            if id(found) not in in_globals:
                files.add(id(found.__globals__))
            if everything and id(found.__globals__) in files:
                named = _named_globals(found)
                in_globals |= {id(each) for each in named}
                waiting += named
        elif issubclass(kind, functools.partial):
            waiting += [found.func, found.args, found.keywords]
        elif issubclass(kind, tuple):
            waiting += tuple.__iter__(found)
        elif issubclass(kind, list):
            waiting += list.__iter__(found)
        elif issubclass(kind, dict):
            waiting += (
                [*dict.keys(found), *dict.values(found)] if everything else dict.values(found)
            )
        elif everything:
            waiting += (
                [weakref.ref.__call__(found)]
                if issubclass(kind, weakref.ref)
                else gc.get_referents(found)
            )


def _named_globals(function: types.FunctionType) -> list[Any]:
    """Return the modules and callables in the global variables that the function's code names."""
    followed = (torch.nn.Module, types.FunctionType, types.MethodType, functools.partial)
    values: dict[str, Any] = {}
    codes = [function.__code__]
    for code in codes:
        # The codes of functions inside it.
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        found = {name: function.__globals__.get(name) for name in code.co_names}
        found = {name: value for name, value in found.items() if issubclass(type(value), followed)}
        # Why not all of co_names: it also has the names of attributes. It takes the most time.
        if found:
            values.update((name, found[name]) for name in _loaded_globals(code) if name in found)
    return list(values.values())


@functools.lru_cache(maxsize=4096)
def _loaded_globals(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of the global variables that the code loads."""
    return tuple(
        each.argval
        for each in dis.get_instructions(code)
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
