"""``plan_units``: which unit owns each leaf, and where the leaf lies in the unit's flat buffers."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from funcshard._utils import tree
from funcshard._utils.cutting import cutter
from funcshard.plan.leaves import Leaf
from funcshard.plan.mesh_axes import AXES, Axes
from funcshard.plan.unit_options import decided_options
from funcshard.plan.unit_plan import BufferPlan, LeafSpec, UnitPlan, owners_of


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
