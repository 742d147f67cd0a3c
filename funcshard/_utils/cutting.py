"""Cut the parts of units out of a tree's structure; see ``tree`` for structures and paths.

If keys of dictionaries have dots, several nodes can lie at one path. They become one dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from funcshard._utils import tree
from funcshard._utils.tree import Structure

_DICTS = ("dict", "ordered_dict")


def cutter(structure: Structure) -> Callable[[str | Sequence[str], dict[int, int]], Structure]:
    """Return a function that cuts units out of a structure.

    Returns:
        ``cut(path, keep)`` -> the part under a unit's ``path``, where ``keep`` maps numbers of
        leaves in the whole tree to those in the unit. Other leaves become ``None``, or their keys
        with dots are left out.

        For several paths, it returns a dictionary from path to part, without paths that only have
        tied leaves.
    """
    children_of: dict[str, dict[str, list[Structure]]] = {}  # by path: the nodes below, by key

    def nodes_at(path: str) -> list[Structure]:
        nodes, path_above = [structure], ""
        for key in path.split(".") if path else ():
            # Why kept: units lie side by side, and a node may have thousands of children.
            if path_above not in children_of:
                children_of[path_above] = _children(nodes)
            nodes = children_of[path_above].get(key, [])
            path_above += f".{key}"
        return nodes

    def cut(path: str | Sequence[str], keep: dict[int, int]) -> Structure:
        if isinstance(path, str):
            return _prune(_merged(nodes_at(path), path), keep)
        parts = {p: _prune(_merged(nodes_at(p), p), keep) for p in sorted(path) if nodes_at(p)}
        return ("dict", (*parts,), (*parts.values(),))

    return cut


def _children(nodes: Sequence[Structure]) -> dict[str, list[Structure]]:
    """Return the nodes below, by key: several if keys have dots, or are one text, as 1 and "1"."""
    nodes_by_key: dict[str, list[Structure]] = {}
    for kind, meta, children in [node for node in nodes if isinstance(node, tuple)]:
        keys = meta if kind in _DICTS else range(len(children))
        if kind == "custom":
            keys = tree.entries_of((kind, meta, children))
        for key, child in zip(map(str, keys), children, strict=True):
            # A key with dots is a path of nested dictionaries, each of which has one key.
            first_key, dot, later_keys = key.partition(".")
            inner_node = ("dict", (later_keys,), (child,)) if dot else child
            nodes_by_key.setdefault(first_key, []).append(inner_node)
    return nodes_by_key


def _merged(nodes: Sequence[Structure], path: str) -> Structure:
    containers = [node for node in nodes if node is not None]
    # The usual case: one node, which is taken as it is.
    if len(containers) < 2:
        return containers[0] if containers else None
    if not all(isinstance(node, tuple) and node[0] in _DICTS for node in containers):
        raise ValueError(
            "a tree that mixes nested containers and dotted keys under one path can be cut there "
            f"only if all of them are dictionaries; found another node at {path!r}: nest the whole "
            "tree, or flatten it"
        )
    all_keys = [key for _, meta, _ in containers for key in meta]
    return ("dict", tuple(all_keys), tuple([child for *_, inner in containers for child in inner]))


def _prune(structure: Structure, keep: dict[int, int]) -> Structure:
    """Renumber the leaves in ``keep`` and remove all others."""
    if structure is None:
        return None
    if isinstance(structure, int):
        return keep.get(structure)
    node_kind, meta, children = structure
    pruned_children = []
    for child in children:  # a comprehension would take a second frame of Python's bounded stack
        pruned_children.append(_prune(child, keep))
    if node_kind in _DICTS and any("." in str(key) for key in meta):
        kept_indices = [i for i, child in enumerate(pruned_children) if child is not None]
        meta, pruned_children = (
            tuple([meta[i] for i in kept_indices]),
            [pruned_children[i] for i in kept_indices],
        )
    return (node_kind, meta, tuple(pruned_children))
