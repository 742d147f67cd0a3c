"""The parts of a plan from the data of its JSON, each checked before it is used.

The text may be damaged, or made to do harm: a plan that this file lets through has the types and
the ranges that ``make_plan`` gives. The names of later versions are refused.
"""

from __future__ import annotations

import math
from typing import Any

from funcshard._utils import check_structure, file_data, tree
from funcshard.plan.mesh_axes import AXES, Axes, mesh_axes_of, world_size_of
from funcshard.plan.precision import MixedPrecision
from funcshard.plan.unit_plan import BufferPlan, LeafCut, LeafSpec, Placements, UnitPlan

_UNIT = ("name", "strategy", "reshard_after_forward", "mesh_shape", "structure", "buffers")
_LATER_UNIT = (
    "offload",
    "precision",
    "full_precision",
    "reshard_after_backward",
    "members",
    "axes",
)
_BUFFER, _LATER_BUFFER = ("key", "dtype", "trainable", "leaves", "shards"), ("local",)
_LEAF, _LATER_LEAF = ("path", "shape", "offset", "index"), ("aliases", "cuts", "placements")
_MOST_RANKS = 2**31 - 1
_MOST_ELEMENTS = file_data.MOST // 16  # the largest elements have 16 bytes


def shape_from(data: Any) -> tuple[int, int]:
    """Return the sizes of the data axes."""
    replicate, shard = file_data.numbers(
        "mesh_shape", file_data.listed("mesh_shape", data, 2), 1, _MOST_RANKS
    )
    return replicate, shard


def axes_from(data: Any, shape: tuple[int, int]) -> Axes:
    """Return the axes of a mesh, whose data axes have the sizes ``shape``."""
    found = []
    for axis in file_data.listed("axes", data):
        name, size = file_data.listed("an axis", axis, 2)
        found.append(
            (
                file_data.text("the name of an axis", name),
                file_data.whole("the size of an axis", size, 1),
            )
        )
    axes = dict(found or zip(AXES, shape, strict=True))
    if tuple(map(axes.get, AXES)) != shape or len(axes) < len(found):
        raise ValueError(
            f"axes must have the data axes of mesh_shape {shape}; found {file_data.shown(data)}"
        )
    if world_size_of(mesh_axes_of(axes, "axes")) > _MOST_RANKS:
        raise ValueError(
            f"axes must have at most {_MOST_RANKS} ranks; found {file_data.shown(data)}"
        )
    return tuple(found)


def structure_from(data: Any, leaves: int) -> tree.Structure:
    """Return a structure of so many leaves."""
    structure = tree.freeze(data)
    if (found := check_structure(structure)) != leaves:
        raise ValueError(f"a structure must have the leaves of its units, {leaves}; found {found}")
    return structure


def precision_from(data: Any) -> MixedPrecision | None:
    """Return a precision, or ``None``."""
    if data is None:
        return None
    try:
        return MixedPrecision.from_data(file_data.table("precision", data))
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"precision must be a MixedPrecision; found {file_data.shown(data)}: {error}"
        ) from None


def unit_from(data: Any) -> UnitPlan:
    """Return a unit."""
    fields = {**file_data.table("a unit", data, _UNIT, _LATER_UNIT, others=False)}
    shape = shape_from(fields["mesh_shape"])
    axes = axes_from(fields.get("axes", []), shape)
    known = dict(axes or zip(AXES, shape, strict=True))
    freed = fields["reshard_after_forward"]
    buffers = tuple(
        [_buffer_from(buffer, known) for buffer in file_data.listed("buffers", fields["buffers"])]
    )
    if len({buffer.key for buffer in buffers}) < len(buffers):
        raise ValueError("the buffers of a unit must have different keys")
    return UnitPlan(
        file_data.text("the name of a unit", fields["name"]),
        file_data.text("strategy", fields["strategy"]),
        freed if type(freed) is bool else file_data.whole("reshard_after_forward", freed, 2),
        shape,
        structure_from(fields["structure"], sum(len(buffer.leaves) for buffer in buffers)),
        buffers,
        file_data.flag("offload", fields.get("offload", False)),
        precision_from(fields.get("precision")),
        file_data.flag("full_precision", fields.get("full_precision", False)),
        file_data.flag("reshard_after_backward", fields.get("reshard_after_backward", True)),
        file_data.texts("members", fields.get("members", [])),
        axes,
    )


def _buffer_from(data: Any, axes: dict[str, int]) -> BufferPlan:
    fields = file_data.table("a buffer", data, _BUFFER, _LATER_BUFFER, others=False)
    local = file_data.texts("local", fields.get("local", []))
    if not {*local} <= axes.keys() or len({*local}) < len(local):
        raise ValueError(f"local must name axes of the mesh {axes}; found {file_data.shown(local)}")
    leaves = tuple(
        [_leaf_from(leaf, axes) for leaf in file_data.listed("leaves", fields["leaves"])]
    )
    file_data.whole(
        "the number of elements of a buffer",
        sum([leaf.numel for leaf in leaves]),
        0,
        _MOST_ELEMENTS,
    )
    return BufferPlan(
        file_data.text("the key of a buffer", fields["key"]),
        file_data.text("dtype", fields["dtype"]),
        file_data.flag("trainable", fields["trainable"]),
        leaves,
        file_data.whole("shards", fields["shards"], 1),
        local,
    )


def _leaf_from(data: Any, axes: dict[str, int]) -> LeafSpec:
    fields = file_data.table("a leaf", data, _LEAF, _LATER_LEAF, others=False)
    path = file_data.text("the path of a leaf", fields["path"])
    shape = file_data.numbers(f"the shape of leaf {path!r}", fields["shape"])
    cuts = cuts_from(fields.get("cuts", []), shape, axes)
    return LeafSpec(
        path,
        shape,
        file_data.whole(f"the offset of leaf {path!r}", fields["offset"]),
        file_data.whole(f"the index of leaf {path!r}", fields["index"]),
        file_data.texts("aliases", fields.get("aliases", [])),
        cuts,
        _placements_from(fields.get("placements", []), shape, axes),
    )


def cuts_from(data: Any, shape: tuple[int, ...], axes: dict[str, int]) -> tuple[LeafCut, ...]:
    """Return how a leaf is a slice of a larger tensor, and check that no size is beyond torch's.

    Arguments:
        data: the cuts.
        shape: the shape of the slice.
        axes: size of each axis of the mesh.
    """
    found = []
    for cut in file_data.listed("cuts", data) if data else ():
        axis, dim, ranks = file_data.listed("a cut", cut, 3)
        file_data.whole("the dim of a cut", dim, 0, len(shape) - 1)
        if axes.get(file_data.text("the axis of a cut", axis)) != file_data.whole(
            "the ranks of a cut", ranks, 1
        ):
            raise ValueError(
                f"a cut must be along an axis of the mesh {axes}; found {file_data.shown(cut)}"
            )
        found.append(LeafCut(axis, dim, ranks))
    numel = math.prod(shape) * math.prod([cut.ranks for cut in found])
    file_data.whole("the number of elements of a tensor", numel, 0, _MOST_ELEMENTS)
    return tuple(found)


def _placements_from(data: Any, shape: tuple[int, ...], axes: dict[str, int]) -> Placements:
    found = []
    for placement in file_data.listed("placements", data):
        axis, dim = file_data.listed("a placement", placement, 2)
        if file_data.text("the axis of a placement", axis) not in axes:
            raise ValueError(
                f"a placement must be along an axis of the mesh {axes}; found "
                f"{file_data.shown(placement)}"
            )
        found.append(
            (
                axis,
                None
                if dim is None
                else file_data.whole("the dim of a placement", dim, 0, len(shape) - 1),
            )
        )
    return tuple(found)
