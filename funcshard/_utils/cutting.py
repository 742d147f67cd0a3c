"""Cut the parts of units out of a tree's structure; see ``tree`` for structures and paths.

If keys of a dictionary have dots, several of them can lie under one path. The node at that path is
then one dictionary of all their nodes.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

from funcshard._utils import tree
from funcshard._utils.tree import Structure

_ABSENT = object()


def cutter(structure: Structure) -> Callable[[str | Sequence[str], dict[int, int]], Structure]:
    """Return a function that cuts one of many units out of a structure, without a search.

    Returns:
        ``cut(path, keep)`` -> the part of ``structure`` under a unit's ``path``, with the unit's
        leaves renumbered. The path ``""`` is the whole tree. Of keys with dots, those that start
        with ``path`` are kept, without ``path``. ``keep`` maps the number of a leaf in the whole
        tree to its number in the unit. All other leaves belong to other units: they become
        ``None``, or their keys are left out of a dictionary with dotted keys.

        Of several paths, ``cut`` returns a dictionary from each path to the part under it. A path
        at which only tied leaves are used, and which the tree therefore lacks, is left out.
    """
    find = _finder(structure)

    def cut(path: str | Sequence[str], keep: dict[int, int]) -> Structure:
        if not isinstance(path, str):
            found_nodes = {unit_path: find(unit_path) for unit_path in sorted(path)}
            kept = {
                unit_path: _prune(node, keep)
                for unit_path, node in found_nodes.items()
                if node is not _ABSENT
            }
            return ("dict", tuple(kept), tuple(kept.values()))
        node = find(path)
        assert node is not _ABSENT, f"no node at {path!r}"
        return _prune(node, keep)

    return cut


class _Keys(NamedTuple):
    """The keys of a container as text.

    Attributes:
        at: the positions of each key; the keys 1 and "1" are one text.
        order: the keys in sorted order with their positions, if any has a dot. The keys under a
            path are neighbours in it.
    """

    at: dict[str, list[int]]
    order: list[tuple[str, int]]


def _keys_of(structure: Structure) -> _Keys:
    node_kind, meta, children = structure
    if node_kind in ("dict", "ordered_dict"):
        keys = [str(key) for key in meta]
    elif node_kind == "custom":
        keys = [str(entry) for entry in tree.entries_of(structure)]
    else:
        keys = [str(index) for index in range(len(children))]
    at: dict[str, list[int]] = {}
    for position, key in enumerate(keys):
        at.setdefault(key, []).append(position)
    dotted = any("." in key for key in at)
    return _Keys(at, sorted((key, position) for position, key in enumerate(keys)) if dotted else [])


def _finder(structure: Structure) -> Callable[[str], Structure]:
    """Return a function from a path to the node there, or ``_ABSENT``."""
    known_keys: dict[int, _Keys] = {}  # by the id of a container, which the structure keeps alive

    def descend(node: Structure, path: str) -> Structure:
        if path == "":
            return node
        if not isinstance(node, tuple):
            return _ABSENT
        keys = known_keys.get(id(node))
        if keys is None:
            keys = known_keys[id(node)] = _keys_of(node)
        children = node[2]
        inner_nodes = [children[i] for i in keys.at.get(path, ())]
        for i, inner_path in sorted(_inside(keys, path)):
            inner = descend(children[i], inner_path)
            if inner is not _ABSENT:
                inner_nodes.append(inner)
        below = sorted(_below(keys, path))
        if below:
            inner_nodes.append(
                (
                    "dict",
                    tuple([inner_path for _, inner_path in below]),
                    tuple([children[i] for i, _ in below]),
                )
            )
        merged = inner_nodes[0] if inner_nodes else _ABSENT
        for other_node in inner_nodes[1:]:
            if merged is None:
                merged = other_node
            elif other_node is not None:
                merged = _merge(merged, other_node, path)
        return merged

    return lambda path: descend(structure, path)


def _inside(keys: _Keys, path: str) -> list[tuple[int, str]]:
    """Return the children that ``path`` leads through: their positions, and the rest of it."""
    inside_keys, end = [], path.find(".")
    while end >= 0:
        inside_keys += [(i, path[end + 1 :]) for i in keys.at.get(path[:end], ())]
        end = path.find(".", end + 1) if keys.order else -1  # only keys with dots reach further
    return inside_keys


def _below(keys: _Keys, path: str) -> list[tuple[int, str]]:
    """Return the children whose keys begin with ``path``: their positions, and rests of keys."""
    # "/" is the character after the dot.
    begin, end = (bisect.bisect_left(keys.order, (path + separator,)) for separator in "./")
    return [(i, key[len(path) + 1 :]) for key, i in keys.order[begin:end]]


def _merge(one: Structure, other: Structure, path: str) -> Structure:
    """Merge two dictionaries of one path, as a tree with nested and dotted keys has them."""
    if not all(
        isinstance(node, tuple) and node[0] in ("dict", "ordered_dict") for node in (one, other)
    ):
        raise ValueError(
            "a tree that mixes nested containers and dotted keys under one path can be cut there "
            f"only if all of them are dictionaries; found another node at {path!r}: nest the whole "
            "tree, or flatten it"
        )
    return ("dict", (*one[1], *other[1]), (*one[2], *other[2]))


def _prune(structure: Structure, keep: dict[int, int]) -> Structure:
    """Renumber the leaves in ``keep`` and remove all others; see ``cutter``."""
    if structure is None:
        return None
    if isinstance(structure, int):
        return keep.get(structure)
    node_kind, meta, children = structure
    pruned = []
    for child in children:  # a comprehension would take a second frame of Python's bounded stack
        pruned.append(_prune(child, keep))
    if node_kind in ("dict", "ordered_dict") and any("." in str(key) for key in meta):
        kept = [i for i, child in enumerate(pruned) if child is not None]
        meta, pruned = tuple([meta[i] for i in kept]), [pruned[i] for i in kept]
    return (node_kind, meta, tuple(pruned))
