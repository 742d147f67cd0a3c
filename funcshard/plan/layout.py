"""``plan_units``: which unit owns each leaf, and where the leaf lies in the unit's flat buffers.

``cutter`` cuts a unit's part out of the structure of the tree. If keys of dictionaries have dots,
several nodes can lie at one path. They become one dictionary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from funcshard._utils import tree
from funcshard.plan.leaves import Leaf
from funcshard.plan.mesh_axes import AXES, Axes
from funcshard.plan.unit_options import decided_options
from funcshard.plan.unit_plan import BufferPlan, LeafSpec, UnitPlan, owners_of

_DICTS = ("dict", "ordered_dict")


def plan_units(
    structure: tree.Structure,
    leaves: Sequence[Leaf],
    paths: Mapping[str, tuple[str, ...]],
    options: Mapping[str, Mapping[str, Any]],
    axes: Axes,
    mesh_axes: Mapping[str, int],
) -> tuple[UnitPlan, ...]:
    """Lay the units out, and cut their buffers into shards."""
    shards = mesh_axes["shard"]
    unit_plans = []
    unit_layouts = _laid_out(structure, tuple(leaves), tuple(paths.items()))
    for unit_name, members, unit_structure, buffers in unit_layouts:
        unit_options = decided_options(unit_name, options[unit_name], shards)
        # Layouts hold buffers of one shard, because plans for other meshes share them.
        if shards > 1 and unit_options["strategy"] != "no_shard":
            # Why not all: each rank of the shard axis has values of its own in a local one.
            buffers = tuple(
                [
                    buffer if "shard" in buffer.local else replace(buffer, shards=shards)
                    for buffer in buffers
                ]
            )
        unit_plans.append(
            UnitPlan(
                name=unit_name,
                mesh_shape=(mesh_axes["replicate"], shards),
                structure=unit_structure,
                buffers=buffers,
                members=members,
                axes=axes,
                **unit_options,
            )
        )
    return tuple(unit_plans)


# Why few: this holds every leaf of its model.
# Why a cache: plans for other meshes and strategies share a layout, so a sweep works it out once.
@functools.lru_cache(maxsize=4)
def _laid_out(
    structure: tree.Structure,
    leaves: tuple[Leaf, ...],
    named_paths: tuple[tuple[str, tuple[str, ...]], ...],
) -> tuple[tuple[str, tuple[str, ...], tree.Structure, tuple[BufferPlan, ...]], ...]:
    """Return the leaves of each unit that owns one.

    Returns:
        For each of them its name, the paths of a group or ``()``, the structure of its part of the
        tree, and its flat buffers, which aren't cut into shards.
    """
    paths = dict(named_paths)
    path_owners = owners_of(paths)
    unit_leaves: dict[str, list[Leaf]] = {unit_name: [] for unit_name in paths}
    for leaf in leaves:
        units_around = [
            path_owners[node] for node in tree.upwards(leaf.paths[0]) if node in path_owners
        ]
        # A tied leaf belongs to the innermost unit that holds all of its uses. The root does.
        unit_owner = next(
            unit_name
            for unit_name in units_around
            if all(tree.is_under_any(path, paths[unit_name]) for path in leaf.paths[1:])
        )
        unit_leaves[unit_owner].append(leaf)
    # Why one cutter: it searches the structure once for all units.
    cut = cutter(structure)
    unit_layouts = []
    for unit_name, owned_leaves in unit_leaves.items():
        if not owned_leaves:
            continue
        buffers = _buffers(owned_leaves)
        order = [leaf.index for buffer in buffers for leaf in buffer.leaves]
        # A unit numbers its leaves buffer by buffer, in the order of its own flat buffers.
        positions = {index: position for position, index in enumerate(order)}
        member_paths: tuple[str, ...] = ()
        # A group may have one path, if its other modules have become units of full precision.
        if paths[unit_name] != (unit_name,):
            # Why only some: a group enters a module for the leaves that it owns there.
            owned_nodes = {
                node
                for leaf in owned_leaves
                for leaf_path in leaf.paths
                for node in tree.upwards(leaf_path)
            }
            member_paths = tuple(
                leaf_path for leaf_path in paths[unit_name] if leaf_path in owned_nodes
            )
        unit_layouts.append(
            (unit_name, member_paths, cut(member_paths or unit_name, positions), buffers)
        )
    return tuple(unit_layouts)


def _buffers(leaves: Sequence[Leaf]) -> tuple[BufferPlan, ...]:
    """Return the flat buffers of a unit's leaves, which aren't cut into shards."""
    leaf_groups: dict[tuple[tuple[str, ...], bool, str, str], list[Leaf]] = {}
    for leaf in leaves:
        packing_name = f".{leaf.packing.name}_{leaf.packing.block}" if leaf.packing else ""
        group_key = leaf.local, not leaf.trainable, leaf.dtype, packing_name
        leaf_groups.setdefault(group_key, []).append(leaf)
    buffers = []
    # Why sorted: the order of buffers must not depend on that of leaves. Shared leaves come first,
    # and trainable ones before frozen ones.
    for group_key in sorted(leaf_groups):
        local, frozen, dtype, packing_name = group_key
        packing = leaf_groups[group_key][0].packing
        leaf_specs: list[LeafSpec] = []
        offset = 0
        for leaf in leaf_groups[group_key]:
            leaf_shape = leaf.shape
            if packing is not None:
                leaf_shape = (packing.bytes_of(math.prod(leaf.shape)),)
            leaf_spec = LeafSpec(
                path=leaf.paths[0],
                shape=leaf_shape,
                offset=offset,
                index=leaf.leaf_index,
                aliases=leaf.paths[1:],
                cuts=leaf.cuts,
                placements=leaf.placements,
                unpacked=leaf.shape if packing else None,
            )
            leaf_specs.append(leaf_spec)
            offset += leaf_spec.numel
        local_name = ".local" if local == AXES else f".local_{'_'.join(local)}"
        buffer = BufferPlan(
            # Note: plans on disk hold these keys, and fingerprints depend on them, so they may not
            # change.
            key=f"{dtype}{'.frozen' * frozen}{local_name * bool(local)}{packing_name}",
            dtype=dtype if packing is None else "uint8",
            trainable=not frozen,
            leaves=tuple(leaf_specs),
            shards=1,
            local=local,
            packing=packing,
        )
        buffers.append(buffer)
    return tuple(buffers)


# --- the structure of a unit ----------------------------------------------------------------------


def cutter(
    structure: tree.Structure,
) -> Callable[[str | Sequence[str], dict[int, int]], tree.Structure]:
    """Return a function that cuts units out of a structure.

    Returns:
        ``cut(path, keep)`` -> the part under a unit's ``path``, where ``keep`` maps numbers of
        leaves in the whole tree to those in the unit. Other leaves become ``None``, or their keys
        with dots are left out.

        For several paths, it returns a dictionary from path to part, without paths that only have
        tied leaves.
    """
    children_of: dict[str, dict[str, list[tree.Structure]]] = {}  # by path: the nodes below, by key

    def nodes_at(path: str) -> list[tree.Structure]:
        nodes, path_above = [structure], ""
        for key in path.split(".") if path else ():
            # Why kept: units lie side by side, and a node may have thousands of children.
            if path_above not in children_of:
                children_of[path_above] = _children(nodes)
            nodes = children_of[path_above].get(key, [])
            path_above += f".{key}"
        return nodes

    def cut(path: str | Sequence[str], keep: dict[int, int]) -> tree.Structure:
        if isinstance(path, str):
            return _prune(_merged(nodes_at(path), path), keep)
        parts = {p: _prune(_merged(nodes_at(p), p), keep) for p in sorted(path) if nodes_at(p)}
        return ("dict", (*parts,), (*parts.values(),))

    return cut


def _children(nodes: Sequence[tree.Structure]) -> dict[str, list[tree.Structure]]:
    """Return the nodes below, by key: several if keys have dots, or are one text, as 1 and "1"."""
    nodes_by_key: dict[str, list[tree.Structure]] = {}
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


def _merged(nodes: Sequence[tree.Structure], path: str) -> tree.Structure:
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


def _prune(structure: tree.Structure, keep: dict[int, int]) -> tree.Structure:
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
        pairs = zip(meta, pruned_children, strict=True)
        kept_children = {key: child for key, child in pairs if child is not None}
        meta, pruned_children = tuple(kept_children), list(kept_children.values())
    return (node_kind, meta, tuple(pruned_children))
