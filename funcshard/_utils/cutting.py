"""Cut the parts of units out of a tree's structure; see ``tree`` for structures and paths.

If keys of dictionaries have dots, several nodes can lie at one path. They become one dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set

from funcshard._utils import tree
from funcshard._utils.tree import Structure

_DICTS = ("dict", "ordered_dict")


def cutter(
    structure: Structure, paths: Iterable[str]
) -> Callable[[str | Sequence[str], dict[int, int]], Structure]:
    """Return a function that cuts units out of a structure.

    Returns:
        ``cut(path, keep)`` -> the part under a unit's ``path``, where ``keep`` maps numbers of
        leaves in the whole tree to those in the unit. Other leaves become ``None``, or their keys
        with dots are left out.

        For several paths, it returns a dictionary from path to part, without paths that only have
        tied leaves.
    """
    nodes_at = _nodes_at(structure, {*paths})

    def cut(path: str | Sequence[str], keep: dict[int, int]) -> Structure:
        if isinstance(path, str):
            return _prune(_merged(nodes_at[path], path), keep)
        present_paths = [unit_path for unit_path in sorted(path) if nodes_at[unit_path]]
        pruned_parts = [
            _prune(_merged(nodes_at[unit_path], unit_path), keep) for unit_path in present_paths
        ]
        return ("dict", tuple(present_paths), tuple(pruned_parts))

    return cut


def _nodes_at(structure: Structure, paths: Set[str]) -> dict[str, list[Structure]]:
    """Return the nodes at each path: several if keys have dots, or are one text, as 1 and "1"."""
    nodes: dict[str, list[Structure]] = {path: [] for path in paths}
    paths_above = {node for path in paths for node in tree.upwards(path.rpartition(".")[0])}
    to_visit = [(structure, "")]
    while to_visit:
        node, path = to_visit.pop()
        if path in nodes:
            nodes[path].append(node)
        if path not in paths_above or not isinstance(node, tuple):
            continue
        child_nodes = []
        for key, child in zip(_keys_of(node), node[2], strict=True):
            # A key with dots is a path of nested dictionaries, each of which has one key. At the
            # root a dot in front is no end of a path, because the path "" is the root itself.
            dot = key.find(".", int(not path))
            if dot >= 0:
                key, child = key[:dot], ("dict", (key[dot + 1 :],), (child,))
            child_nodes.append((child, f"{path}.{key}" if path else key))
        to_visit += reversed(child_nodes)
    return nodes


def _keys_of(node: Structure) -> list[str]:
    kind, meta, children = node
    if kind in _DICTS:
        return [str(key) for key in meta]
    entries = tree.entries_of(node) if kind == "custom" else range(len(children))
    return [str(entry) for entry in entries]


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
