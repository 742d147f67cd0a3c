"""Leaves whose values differ along mesh axes: the option ``local`` of ``make_plan``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from funcshard._utils import tree
from funcshard.plan.leaves import Leaf, match
from funcshard.plan.mesh_axes import AXES
from funcshard.plan.unit_plan import LeafCut

# Globs of nodes; or, by glob, mesh axes, or tensor dimensions by mesh axis.
Local = Iterable[str] | Mapping[str, str | Sequence[str] | Mapping[str, int]]


def with_local_axes(leaves: Sequence[Leaf], local: Any, mesh_axes: Mapping[str, int]) -> list[Leaf]:
    """Return the leaves with the mesh axes along which their values differ.

    Arguments:
        leaves: the leaves of the tree.
        local: as in ``make_plan``.
        mesh_axes: size of each axis of the mesh.

    Raises:
        ValueError: an axis is not one of the mesh, a leaf lies under nodes with different axes, or
            it has no dimension that is to be cut.
    """
    uses = [leaf.paths for leaf in leaves]
    nodes: dict[str, dict[str, int | None]] = {}
    for node, glob in match(local, uses, "local node").items():
        nodes[node] = _axes(
            glob, local[glob] if isinstance(local, Mapping) else tuple(mesh_axes), mesh_axes
        )
    return [_with_axes(leaf, nodes, mesh_axes) for leaf in leaves] if nodes else list(leaves)


def _with_axes(
    leaf: Leaf, nodes: Mapping[str, dict[str, int | None]], mesh_axes: Mapping[str, int]
) -> Leaf:
    leaf_axes = [nodes[node] for path in leaf.paths for node in tree.upwards(path) if node in nodes]
    if not leaf_axes:
        return leaf
    if any(axes != leaf_axes[0] for axes in leaf_axes):
        ways = sorted({tuple(axes) for axes in leaf_axes})
        raise ValueError(
            f"local nodes overlap: leaf {leaf.paths[0]!r} lies under nodes that are local along "
            f"different axes, {ways}; name each leaf's axes once"
        )
    cuts = []
    for axis, dim in leaf_axes[0].items():
        if dim is not None:
            if not -leaf.tensor.ndim <= dim < leaf.tensor.ndim:
                raise ValueError(
                    f"local leaf {leaf.paths[0]!r} is to be a slice along dim {dim} for axis "
                    f"{axis!r}; found the shape {tuple(leaf.tensor.shape)}: name a dimension that "
                    "the leaf has, or the axis alone"
                )
            # Why cuts into one slice too: they tell a slice from a value of the rank's own when a
            # checkpoint is restored on more ranks.
            cuts.append(LeafCut(axis, dim % leaf.tensor.ndim, mesh_axes[axis]))
    return dataclasses.replace(leaf, local=tuple(leaf_axes[0]), cuts=tuple(cuts))


def _axes(glob: str, given: Any, mesh_axes: Mapping[str, int]) -> dict[str, int | None]:
    """Return, for each axis along which a node is local, the dimension that it cuts, if any."""
    axes_by_node: dict[str, Any] = {}
    if isinstance(given, Mapping):
        axes_by_node = dict(given)
    elif isinstance(given, str | Iterable):
        axes_by_node = dict.fromkeys((given,) if isinstance(given, str) else given)
    are_dims = all(
        dim is None or (isinstance(dim, Integral) and not isinstance(dim, bool))
        for dim in axes_by_node.values()
    )
    if not axes_by_node or axes_by_node.keys() - mesh_axes.keys() or not are_dims:
        raise ValueError(
            f"local node {glob!r} must be local along one or several axes of the mesh, "
            f"{list(mesh_axes)}; found {given!r}: pass names of axes, or the dimension that each "
            f"axis cuts, as in {{'shard': 0}}"
        )
    data = [axis for axis in AXES if axis in axes_by_node]
    return {
        axis: axes_by_node[axis]
        for axis in [
            *data,
            *(axis for axis in mesh_axes if axis in axes_by_node and axis not in AXES),
        ]
    }
