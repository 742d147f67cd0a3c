"""Leaves that are DTensors: their placements along mesh axes, as plan data.

``torch.distributed.tensor.parallel`` cuts the parameters of a module along the axes of a
``DeviceMesh``. Here such an axis is a model axis. The plan keeps the placements by the names of
axes, so it holds no DeviceMesh; the rank's ``Mesh`` has that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from funcshard._utils import is_dtensor
from funcshard.plan.leaves import Leaf
from funcshard.plan.mesh_axes import AXES
from funcshard.plan.unit_plan import LeafCut


def with_placements(leaves: Sequence[Leaf], mesh: Any, mesh_axes: Mapping[str, int]) -> list[Leaf]:
    """Return the leaves, with the placements of those that are DTensors.

    Arguments:
        leaves: the leaves of the tree.
        mesh: the mesh in any form. A ``Mesh`` knows which of its axes represents which axis of a
            DeviceMesh; otherwise they have the same names.
        mesh_axes: size of each axis of the mesh.

    Raises:
        ValueError: see ``make_plan``.
    """
    names = getattr(mesh, "device_axes", {})
    return [_placed(leaf, names, mesh_axes) if is_dtensor(leaf.tensor) else leaf for leaf in leaves]


def _placed(leaf: Leaf, names: Mapping[str, str], mesh_axes: Mapping[str, int]) -> Leaf:
    tensor: Any = leaf.tensor
    device_mesh = tensor.device_mesh
    if leaf.local:
        _refuse(
            leaf,
            "says itself along which axes it is local",
            "option local",
            "leave it out of local",
        )
    if not device_mesh.mesh_dim_names:
        _refuse(
            leaf,
            "must lie on a DeviceMesh whose axes have names",
            "none",
            "pass init_device_mesh(mesh_dim_names=...)",
        )
    dim_by_axis: dict[str, int | None] = {}
    for dim, (name, placement) in enumerate(
        zip(device_mesh.mesh_dim_names, tensor.placements, strict=True)
    ):
        axis = names.get(
            name, name.removeprefix("dp_") if name.removeprefix("dp_") in AXES else name
        )
        if axis in AXES:
            _refuse(
                leaf,
                "must be placed along model axes only, because make_plan cuts leaves along the "
                "data axes itself",
                f"axis {name!r}, the data axis {axis!r}",
                "parallelize the module over the other axes, as in device_mesh['tp'], and name an axis of a mesh of one "
                "axis, as in from_device_mesh(names={'tp': 'tensor'})",
            )
        size = device_mesh.size(dim)
        if mesh_axes.get(axis) != size:
            _refuse(
                leaf,
                f"must be placed along axes of the mesh, {dict(mesh_axes)}",
                f"axis {name!r} of {size} ranks",
                "make the mesh from the same DeviceMesh, or give it the axis, as in "
                f"init_mesh({{..., {axis!r}: {size}}})",
            )
        # Why not is_shard: a placement that deals out slices in another order is a Shard too.
        if type(placement).__name__ not in ("Shard", "Replicate"):
            remedy = "call redistribute on it, with Shard or Replicate along each axis, before make_functional"
            _refuse(
                leaf,
                "must be placed by Shard or Replicate",
                f"{placement} along axis {name!r}",
                remedy,
            )
        dim_by_axis[axis] = placement.dim % tensor.ndim if placement.is_shard() else None
    cuts = tuple(
        LeafCut(axis, dim, mesh_axes[axis]) for axis, dim in dim_by_axis.items() if dim is not None
    )
    size_of = list(tensor.shape)
    for cut in cuts:
        if size_of[cut.dim] % cut.ranks:
            remedy = f"choose a size that the {cut.ranks} ranks divide, or leave the module out of the parallel plan"
            _refuse(
                leaf,
                "must be cut into equal slices",
                f"shape {tuple(tensor.shape)}, cut along dim {cut.dim}",
                remedy,
            )
        size_of[cut.dim] //= cut.ranks
    local = tuple(axis for axis in mesh_axes if dim_by_axis.get(axis) is not None)
    real_cuts = tuple(cut for cut in cuts if cut.ranks > 1)
    return dataclasses.replace(
        leaf, local=local, cuts=real_cuts, placements=tuple(dim_by_axis.items())
    )


def _refuse(leaf: Leaf, rule: str, found: str, remedy: str) -> NoReturn:
    raise ValueError(f"leaf {leaf.paths[0]!r} is a DTensor, which {rule}; found {found}: {remedy}")
