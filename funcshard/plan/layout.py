"""``lay_out``: which unit owns each leaf, and where the leaf lies in the unit's flat buffers.

A layout depends on the tree and on the paths of the units alone. Plans of one model for other
meshes and strategies share it, so a sweep over thousands of plans works it out once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from funcshard._utils import cutter, dtype_name, tree
from funcshard.plan.leaves import Leaf
from funcshard.plan.mesh_axes import AXES
from funcshard.plan.unit_plan import (
    BufferPlan,
    LeafCut,
    LeafSpec,
    Placements,
    innermost_in,
    owners_of,
)


class Layout(NamedTuple):
    """The leaves of one unit.

    Attributes:
        members: the paths of a group; ``()`` for a unit of one path.
        structure: structure of the unit's part of the tree.
        buffers: the flat buffers, not cut into shards.
    """

    members: tuple[str, ...]
    structure: tree.Structure
    buffers: tuple[BufferPlan, ...]


class _Form(NamedTuple):
    """A leaf as data, without its tensor; see ``Leaf``."""

    number: int
    paths: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    frozen: bool
    local: tuple[str, ...]
    cuts: tuple[LeafCut, ...]
    placements: Placements


def lay_out(
    structure: tree.Structure, leaves: Sequence[Leaf], paths: dict[str, tuple[str, ...]]
) -> dict[str, Layout]:
    """Return the layout of each unit that owns a leaf, by name.

    Arguments:
        structure: the structure of the whole tree.
        leaves: all leaves.
        paths: the paths of each unit by name, the root among them.
    """
    forms = tuple([
        _Form(
            leaf.index, leaf.paths, leaf.shape, dtype_name(leaf.tensor.dtype), not leaf.trainable, leaf.local, leaf.cuts,
            leaf.placements,
        )
        for leaf in leaves
    ])  # fmt: skip
    return dict(_laid_out(structure, forms, tuple(paths.items())))


# Why few: a layout holds every leaf of its model.
@functools.lru_cache(maxsize=4)
def _laid_out(
    structure: tree.Structure,
    forms: tuple[_Form, ...],
    named: tuple[tuple[str, tuple[str, ...]], ...],
) -> tuple[tuple[str, Layout], ...]:
    paths = dict(named)
    owned: dict[str, list[_Form]] = {name: [] for name in paths}
    owners, innermost = owners_of(paths), innermost_in(paths)
    for form in forms:
        name = innermost(form.paths[0])
        # A tied leaf belongs to the innermost unit that holds all of its uses.
        if len(form.paths) > 1:
            around = (owners[node] for node in tree.upwards(form.paths[0]) if node in owners)
            name = next(
                name
                for name in around
                if all(tree.is_under_any(path, paths[name]) for path in form.paths)
            )
        assert name is not None, "the root holds every leaf"
        owned[name].append(form)
    cut = cutter(structure, itertools.chain(*paths.values()))
    unit_layouts = []
    for name, owned_leaves in owned.items():
        if owned_leaves:
            buffers = _buffers(owned_leaves)
            order = [leaf.index for buffer in buffers for leaf in buffer.leaves]
            keep = {index: position for position, index in enumerate(order)}
            # Why only some: a group enters a module for the leaves that it owns there.
            used = (
                [path for form in owned_leaves for path in form.paths]
                if len(paths[name]) > 1
                else []
            )
            members = tuple(
                path for path in paths[name] if any(tree.is_under(use, path) for use in used)
            )
            unit_layouts.append((name, Layout(members, cut(members or name, keep), buffers)))
    return tuple(unit_layouts)


def _buffers(forms: Sequence[_Form]) -> tuple[BufferPlan, ...]:
    groups: dict[tuple[tuple[str, ...], bool, str], list[_Form]] = {}
    for form in forms:
        groups.setdefault((form.local, form.frozen, form.dtype), []).append(form)
    return tuple(_buffer(groups[key], *key) for key in sorted(groups))


def _buffer(forms: Sequence[_Form], local: tuple[str, ...], frozen: bool, dtype: str) -> BufferPlan:
    specs: list[LeafSpec] = []
    offset = 0
    for form in forms:
        specs.append(
            LeafSpec(
                form.paths[0],
                form.shape,
                offset,
                form.number,
                form.paths[1:],
                form.cuts,
                form.placements,
            )
        )
        offset += math.prod(form.shape)
    suffix = ""
    if local:
        suffix = ".local" if local == AXES else f".local_{'_'.join(local)}"
    return BufferPlan(
        dtype + ".frozen" * frozen + suffix, dtype, not frozen, tuple(specs), 1, local
    )
