"""Walk the objects that a Python object refers to, and empty the caches of functions."""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from funcshard._utils.tree import tensors_in


def captured(function: Any) -> Iterator[Any]:
    """Yield ``function`` and the objects that it captured, each once.

    It follows what you write: closures, defaults, partials, tuples, lists and values of
    dictionaries. It doesn't enter modules, tensors or classes.
    """
    return _walk(function, everything=False)


def reachable(value: Any) -> Iterator[Any]:
    """Yield ``value`` and every object that can be reached from it, each once.

    It follows all references that the garbage collector knows, weak ones too, and global variables
    that a function's code names. It doesn't enter modules, tensors or classes.
    """
    return _walk(value, everything=True)


def _walk(value: Any, *, everything: bool) -> Iterator[Any]:
    seen_ids: set[int] = set()
    # The files of functions that were not reached by a global variable, and the functions that
    # were. Why: without a limit, the walk would go through all functions that a library calls.
    followed_globals: set[int] = set()
    in_globals: set[int] = set()
    to_visit = [value]
    while to_visit:
        reached_value = to_visit.pop()
        # By identity, because equality and hashes are code of any class.
        if id(reached_value) in seen_ids:
            continue
        seen_ids.add(id(reached_value))
        yield reached_value
        # Why the type, and the iterators of built-in classes: an object of a user may raise in
        # __class__, as a proxy of a dead object does, in __iter__ and in __len__.
        value_type = type(reached_value)
        if issubclass(value_type, (torch.nn.Module, torch.Tensor, type, types.ModuleType)):
            continue
        if issubclass(value_type, types.FunctionType):
            # Why not the function's referents: it refers to the globals of its file, and the walk
            # would go through everything that the file imports. An empty cell has no referents.
            to_visit += gc.get_referents(*(reached_value.__closure__ or ()))
            to_visit += [reached_value.__defaults__, reached_value.__kwdefaults__]
            if id(reached_value) not in in_globals:
                followed_globals.add(id(reached_value.__globals__))
            if everything and id(reached_value.__globals__) in followed_globals:
                named = _named_globals(reached_value)
                in_globals |= {id(named_value) for named_value in named}
                to_visit += named
        elif issubclass(value_type, functools.partial):
            to_visit += [reached_value.func, reached_value.args, reached_value.keywords]
        elif issubclass(value_type, tuple):
            to_visit += tuple.__iter__(reached_value)
        elif issubclass(value_type, list):
            to_visit += list.__iter__(reached_value)
        elif issubclass(value_type, dict):
            if everything:
                to_visit += dict.keys(reached_value)
            to_visit += dict.values(reached_value)
        elif everything and issubclass(value_type, weakref.ref):
            to_visit.append(weakref.ref.__call__(reached_value))
        elif everything:
            to_visit += gc.get_referents(reached_value)


def _named_globals(function: types.FunctionType) -> list[Any]:
    """Return the modules and callables in global variables that the code names."""
    followed_types = (
        torch.nn.Module,
        types.FunctionType,
        types.MethodType,
        functools.partial,
    )
    followed_values: dict[str, Any] = {}
    all_codes = [function.__code__]
    for code in all_codes:
        # The codes of functions inside it.
        all_codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
        named_globals = {name: function.__globals__.get(name) for name in code.co_names}
        # Note: co_names also has the names of attributes, and to look at the code takes longest.
        if any(issubclass(type(value), followed_types) for value in named_globals.values()):
            for name in _loaded_globals(code):
                if issubclass(type(named_globals[name]), followed_types):
                    followed_values[name] = named_globals[name]
    return list(followed_values.values())


@functools.lru_cache(maxsize=4096)
def _loaded_globals(code: types.CodeType) -> tuple[str, ...]:
    return tuple(
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )


# --- caches of functions --------------------------------------------------------------------------

_CACHE = type(functools.lru_cache(id))


@contextlib.contextmanager
def emptied_caches(classes: Iterable[type]) -> Iterator[None]:
    """Empty caches of tensors in the files of classes, before the block and after it.

    In the block tensors have no data. With ``functools.lru_cache``, a function would return them to
    later calls, and the tensors of earlier calls to the block. Caches of other values stay, such as
    that of a function that always has to return the same object.
    """
    caches = list(_caches_in({cls.__module__ for cls in classes}))
    _empty(caches)
    try:
        yield
    finally:
        _empty(caches)


def _empty(caches: Iterable[Any]) -> None:
    for cache in caches:
        # Note: the results are among the referents, or in a dictionary there.
        if any(True for _ in tensors_in(gc.get_referents(cache))):
            cache.cache_clear()


def _caches_in(file_names: set[str]) -> Iterator[Any]:
    """Yield the cached functions and methods of Python modules, also those in wrappers."""
    for file_name in file_names & sys.modules.keys():
        values = list(vars(sys.modules[file_name]).values())
        for value in list(values):
            # Why the type: an object of a user may raise in __class__.
            if issubclass(type(value), type) and value.__module__ == file_name:
                values += vars(value).values()
        for value in values:
            is_method = issubclass(type(value), staticmethod | classmethod)
            function = value.__func__ if is_method else value
            if issubclass(type(function), types.FunctionType | _CACHE):
                for part in captured(function):
                    if type(part) is _CACHE and part.__wrapped__.__module__ in file_names:
                        yield part
