"""Pytrees: leaves, dotted paths, and structures that are plain data.

This is the only file that knows optree. A *path* joins the keys from the root to a leaf with dots
(``blocks.0.attn.weight``), so a nested tree and a flat dictionary with dotted keys name their leaves alike.

A *structure* is what remains of a tree without its leaves, written in integers, strings and nested tuples only, so
that it can be hashed, compared and stored as JSON: an integer stands for the leaf of that index, ``None`` for an empty
place, and ``(kind, meta, children)`` for a container.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree

__all__ = [
    "Structure",
    "build",
    "describe",
    "flatten",
    "freeze",
    "is_under",
    "leaves",
    "leaves_up_to",
    "map",
    "natural_key",
    "public_class_name",
    "subtree",
]

_NOTHING = object()
_PACKAGE = __name__.partition(".")[0]


Structure = Any  # int | None | tuple[str, Any, tuple["Structure", ...]]


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of ``tree`` in the library's one order: dictionary keys sorted, sequences as they are."""
    return optree.tree_leaves(tree)


def flatten(tree: Any) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """Split ``tree`` into its leaves and a function that puts leaves back; the inverse is calling that function."""
    flat, spec = optree.tree_flatten(tree)
    return flat, spec.unflatten


def leaves_up_to(tree: Any, deeper: Any) -> list[Any]:
    """Return what stands in ``deeper`` at the places of the leaves of ``tree``."""
    return optree.tree_structure(tree).flatten_up_to(deeper)


def map(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply ``function`` to corresponding leaves of trees of one structure."""
    return optree.tree_map(function, tree, *rest)


def describe(tree: Any) -> tuple[Structure, list[Any], list[str]]:
    """Take ``tree`` apart into ``(structure, leaves, paths)``; ``build`` is the inverse.

    Raises:
        TypeError: a container cannot be written down as data (a defaultdict, a node with unhashable metadata).
        ValueError: two leaves have the same dotted path.
    """
    found: list[Any] = []
    paths: list[str] = []

    def visit(node: Any, path: str) -> Structure:
        if optree.tree_is_leaf(node):
            found.append(node)
            paths.append(path)
            return len(found) - 1
        if node is None:
            return None
        level = optree.tree_flatten_one_level(node)
        children, metadata, entries = level[0], level[1], level[2]
        kind, meta = _kind(node, metadata, path)
        inner = (visit(c, f"{path}.{e}" if path else str(e)) for c, e in zip(children, entries, strict=True))
        return (kind, meta, tuple(inner))

    structure = visit(tree, "")
    if len(set(paths)) != len(paths):
        twice = next(p for p in paths if paths.count(p) > 1)
        raise ValueError(
            f"two leaves of the tree have the path {twice!r}; paths join the keys with dots, so every leaf needs "
            f"its own: rename one of the keys"
        )
    return structure, found, paths


def build(structure: Structure, values: Sequence[Any]) -> Any:
    """Put ``values`` into a tree of the given ``structure``; the inverse of ``describe``."""
    spec, order = _spec(structure)
    return spec.unflatten([values[i] for i in order])


def freeze(value: Any) -> Any:
    """Turn nested lists, as JSON gives them back, into the nested tuples that structures are made of."""
    return tuple(freeze(v) for v in value) if isinstance(value, list) else value


def subtree(structure: Structure, path: str, keep: dict[int, int]) -> Structure:
    """Cut the part of ``structure`` at a unit's ``path``, with its leaves renumbered and others' leaves emptied.

    Arguments:
        structure: the whole tree's.
        path: where to cut; ``""`` is the whole tree. In a flat dictionary with dotted keys the cut keeps the keys
            under ``path``, without it.
        keep: index of a leaf in the whole tree -> its index in the unit. A leaf that is not in it belongs to another
            unit: its place becomes ``None``, or, in a flat dictionary with dotted keys, its key is left out.
    """
    found = _descend(structure, path)
    assert found is not _NOTHING, f"no node at {path!r}"
    return _prune(found, keep)


def is_under(path: str, unit: str) -> bool:
    """Whether ``path`` is ``unit`` itself or lies below it; everything lies below the root ``""``."""
    return unit == "" or path == unit or path.startswith(unit + ".")


def natural_key(path: str) -> tuple[Any, ...]:
    """Sort key that puts ``blocks.2`` before ``blocks.10``."""
    return tuple((0, int(p), "") if p.isdecimal() else (1, 0, p) for p in re.split(r"(\d+)|\.", path) if p)


def _kind(node: Any, metadata: Any, path: str) -> tuple[str, Any]:
    cls = type(node)
    if cls in (list, tuple):
        return cls.__name__, None
    if cls in (dict, OrderedDict):
        return ("dict" if cls is dict else "ordered_dict"), tuple(metadata)
    if optree.is_namedtuple(node):
        return "namedtuple", _name_of(cls)
    if optree.is_structseq(node):
        raise TypeError(f"the {cls.__name__} at {path!r} cannot be part of a plan; convert it to a plain tuple first")
    where = f"at {path!r}" if path else "at the root of the tree"
    try:
        hash(metadata)
    except TypeError:
        raise TypeError(
            f"the {cls.__name__} {where} cannot be part of a plan: a plan is data, and its metadata {metadata!r} "
            f"cannot be hashed; convert it to a dict, list, tuple or namedtuple first"
        ) from None
    if isinstance(node, dict):
        raise TypeError(f"the {cls.__name__} {where} cannot be part of a plan; convert it to a plain dict first")
    return "custom", (_name_of(cls), metadata)


def _name_of(cls: type) -> str:
    public = f"{_PACKAGE}:{cls.__qualname__}"
    inside = cls.__module__.partition(".")[0] == _PACKAGE
    if inside and getattr(sys.modules[_PACKAGE], cls.__qualname__, None) is cls:
        return public  # so that what has been recorded does not depend on the file that defines the class
    return f"{cls.__module__}:{cls.__qualname__}"


def public_class_name(name: str) -> str:
    """Return the name to look a recorded class up by: ``funcshard:TrainState`` for ``funcshard.train:TrainState``.

    Checkpoints written before the package had wings record the classes of this library by file.
    """
    module, _, qualname = name.partition(":")
    known = module.partition(".")[0] == _PACKAGE and hasattr(sys.modules[_PACKAGE], qualname)
    return f"{_PACKAGE}:{qualname}" if known else name


def _find(name: str) -> Any:
    module, _, qualname = public_class_name(name).partition(":")
    return functools.reduce(getattr, qualname.split("."), importlib.import_module(module))


@functools.lru_cache(maxsize=4096)
def _spec(structure: Structure) -> tuple[optree.PyTreeSpec, tuple[int, ...]]:
    # optree may order the leaves of a template otherwise than the structure numbers them, hence the order beside it
    template = _construct(structure)
    return optree.tree_structure(template), tuple(optree.tree_leaves(template))


def _construct(structure: Structure) -> Any:
    if structure is None or isinstance(structure, int):
        return structure
    kind, meta, inner = structure
    children = [_construct(child) for child in inner]
    if kind == "list":
        return children
    if kind == "tuple":
        return tuple(children)
    if kind == "dict":
        return dict(zip(meta, children, strict=True))
    if kind == "ordered_dict":
        return OrderedDict(zip(meta, children, strict=True))
    if kind == "namedtuple":
        return _find(meta)(*children)
    assert kind == "custom", kind
    cls = _find(meta[0])
    entry = optree.register_pytree_node.get(cls)
    assert entry is not None, f"{cls} is no longer registered with optree"
    return entry.unflatten_func(meta[1], children)


def _descend(structure: Structure, path: str) -> Structure:
    """The node at ``path``; where dictionary keys have dots, what all keys under ``path`` hold, put together."""
    if path == "":
        return structure
    if not isinstance(structure, tuple):
        return _NOTHING
    kind, meta, children = structure
    keys = [str(key) for key in (meta if kind in ("dict", "ordered_dict") else _entries(structure))]
    pairs = list(zip(keys, children, strict=True))
    whole = [child for key, child in pairs if key == path]
    inside = [_descend(child, path[len(key) + 1 :]) for key, child in pairs if path.startswith(f"{key}.")]
    below = [(key[len(path) + 1 :], child) for key, child in pairs if key.startswith(f"{path}.")]
    found = [node for node in (*whole, *inside) if node is not _NOTHING]
    if below:
        found.append(("dict", tuple(key for key, _ in below), tuple(child for _, child in below)))
    return functools.reduce(_merge, found) if found else _NOTHING


def _merge(one: Structure, other: Structure) -> Structure:
    """Put two dictionaries of one path together; trees that mix nesting and dotted keys have them."""
    if not all(isinstance(node, tuple) and node[0] in ("dict", "ordered_dict") for node in (one, other)):
        raise ValueError(
            "a tree that mixes nested containers and dotted keys under one path can be cut only where both are "
            "dictionaries; nest it all, or flatten it all"
        )
    return ("dict", (*one[1], *other[1]), (*one[2], *other[2]))


def _entries(structure: Structure) -> Sequence[Any]:
    return optree.tree_flatten_one_level(_construct(structure))[2]


def _prune(structure: Structure, keep: dict[int, int]) -> Structure:
    if structure is None:
        return None
    if isinstance(structure, int):
        return keep.get(structure)
    kind, meta, children = structure
    pruned = tuple(_prune(child, keep) for child in children)
    if kind in ("dict", "ordered_dict") and any("." in str(key) for key in meta):
        kept = [i for i, child in enumerate(pruned) if child is not None]
        meta, pruned = tuple(meta[i] for i in kept), tuple(pruned[i] for i in kept)
    return (kind, meta, pruned)
