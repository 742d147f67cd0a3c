"""Check what a file says of a tree: its structure and its classes, before ``tree`` builds anything.

A class is named ``module:qualname``. Only loaded modules are searched, and no attribute is
computed, so that no ``__getattr__`` imports a module.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def loaded_class(name: Any) -> type | None:
    """Return the class of a recorded name, or ``None`` if no loaded module has it."""
    if type(name) is not str:
        return None
    module, _, qualname = name.partition(":")
    named_value: Any = sys.modules.get(module)
    for class_name in qualname.split("."):
        named_value = _namespace(named_value).get(class_name)
        if not _is_class(named_value):
            return None
    return named_value


def _namespace(owner: Any) -> Mapping[str, Any]:
    """Return the names that a module or a class itself holds."""
    # Why not vars: the modules of importlib's LazyLoader are imported when any attribute is asked
    # for, and a metaclass may compute the attributes of its classes.
    if issubclass(type(owner), ModuleType):
        class_namespace: Mapping[str, Any] = object.__getattribute__(owner, "__dict__")
        return class_namespace
    return type.__dict__["__dict__"].__get__(owner) if _is_class(owner) else {}


def _is_class(value: Any) -> bool:
    # Why not isinstance: it asks an object for its __class__, which may be computed.
    return issubclass(type(value), type)


def check_structure(structure: Any) -> int:
    """Return the number of leaves of a structure from a file.

    Raise ``ValueError`` if it's no structure, or if the numbers of its leaves have gaps.
    """
    to_visit, leaf_indices = [structure], set[int]()
    while to_visit:
        node = to_visit.pop()
        if type(node) is int and node >= 0:
            leaf_indices.add(node)
        elif _is_container(node):
            # Children wait in a list, so that a deep tree cannot exhaust the stack.
            to_visit.extend(node[2])
        elif node is not None:
            raise ValueError(
                "a tree must hold leaves, and containers with the keys or the class of each; found "
                f"{str(node)[:60]}"
            )
    if len(leaf_indices) != max(leaf_indices, default=-1) + 1:
        raise ValueError("the leaves of a tree must be numbered from 0, without gaps")
    return len(leaf_indices)


def _is_container(node: Any) -> bool:
    if not (type(node) is tuple and len(node) == 3 and type(node[2]) is tuple):
        return False
    kind, meta, children = node
    try:
        hash(meta)
    except TypeError:
        return False
    if kind in ("dict", "ordered_dict"):
        return type(meta) is tuple and len(set(meta)) == len(meta) == len(children)
    if kind == "custom":
        return type(meta) is tuple and len(meta) == 2 and type(meta[0]) is str
    return (kind in ("list", "tuple") and meta is None) or (
        kind == "namedtuple" and type(meta) is str
    )
