"""Leaves that differ along mesh axes, by the option ``local`` or as DTensors; ``storage``.

The plan keeps placements by the names of axes; the rank's ``Mesh`` has the DeviceMesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NoReturn

import torch

from funcshard._utils import tree
from funcshard._utils.tensors import dtype_of, is_dtensor
from funcshard.plan.layout import Leaf
from funcshard.plan.mesh_axes import AXES
from funcshard.plan.storage import Encode, Packing, Storage, built_in
from funcshard.plan.unit_options import last_match, list_of_globs, match
from funcshard.plan.unit_plan import LeafCut

# Globs of nodes; or, by glob, mesh axes, or tensor dimensions by mesh axis.
Local = Iterable[str] | Mapping[str, str | Sequence[str] | Mapping[str, int]]


def with_local_axes(
    leaves: list[Leaf], local: Any, mesh_axes: Mapping[str, int]
) -> list[Leaf]:
    """Return the leaves with the mesh axes of ``local``, along which their values differ.

    Raises:
        ValueError: the mesh has no such axis, or a leaf has no dimension to cut.
    """
    globs = list_of_globs(local, "local nodes")
    match(globs, [leaf.paths for leaf in leaves], "local node")
    options = (
        local if isinstance(local, Mapping) else dict.fromkeys(globs, tuple(mesh_axes))
    )
    axis_options = {glob: _read_axes(glob, options[glob], mesh_axes) for glob in globs}
    return [_with_axes(leaf, axis_options, mesh_axes) for leaf in leaves]


def _with_axes(
    leaf: Leaf,
    axis_options: Mapping[str, dict[str, int | None]],
    mesh_axes: Mapping[str, int],
) -> Leaf:
    leaf_nodes = {node for path in leaf.paths for node in tree.upwards(path) if node}
    glob = last_match(axis_options, leaf_nodes)
    if glob is None:
        return leaf
    leaf_axes = axis_options[glob]
    leaf_cuts, ndim = [], len(leaf.shape)
    for mesh_axis, tensor_dim in leaf_axes.items():
        if tensor_dim is None:
            continue
        if not -ndim <= tensor_dim < ndim:
            raise ValueError(
                f"local leaf {leaf.paths[0]!r} is to be a slice along dim {tensor_dim} for axis "
                f"{mesh_axis!r}; found the shape {leaf.shape}: name a dimension that the leaf has, "
                "or the axis alone"
            )
        # Why cuts into one slice too: they tell a slice from a value of the rank's own when a
        # checkpoint is restored on more ranks.
        leaf_cuts.append(LeafCut(mesh_axis, tensor_dim % ndim, mesh_axes[mesh_axis]))
    return leaf._replace(local=tuple(leaf_axes), cuts=tuple(leaf_cuts))


def _read_axes(
    glob: str, option: Any, mesh_axes: Mapping[str, int]
) -> dict[str, int | None]:
    """Return the axes along which a node is local, each with the dimension that it cuts, if any."""
    axis_dims: dict[str, Any] = {}
    if isinstance(option, Mapping):
        axis_dims = dict(option)
    elif isinstance(option, str):
        axis_dims = {option: None}
    elif isinstance(option, Iterable):
        axis_dims = dict.fromkeys(option)
    are_dims = all(
        tensor_dim is None
        or (isinstance(tensor_dim, Integral) and not isinstance(tensor_dim, bool))
        for tensor_dim in axis_dims.values()
    )
    if not axis_dims or axis_dims.keys() - mesh_axes.keys() or not are_dims:
        raise ValueError(
            f"local node {glob!r} must be local along one or several axes of the mesh, "
            f"{list(mesh_axes)}; found {option!r}: pass names of axes, or the dimension that each "
            f"axis cuts, as in {{'shard': 0}}"
        )
    # Why data axes first: buffers and their keys have this order.
    return {
        mesh_axis: axis_dims[mesh_axis]
        for mesh_axis in dict.fromkeys((*AXES, *mesh_axes))
        if mesh_axis in axis_dims
    }


def with_placements(
    leaves: Sequence[Leaf],
    tensors: Sequence[torch.Tensor],
    mesh: Any,
    mesh_axes: Mapping[str, int],
) -> list[Leaf]:
    """Return the leaves, with the placements of those whose tensors are DTensors."""
    # Note: a ``Mesh`` knows which of its axes is which of a DeviceMesh; otherwise the names agree.
    axis_names = getattr(mesh, "device_axes", {})
    return [
        _placed(leaf, tensor, axis_names, mesh_axes) if is_dtensor(tensor) else leaf
        for leaf, tensor in zip(leaves, tensors, strict=True)
    ]


def _placed(
    leaf: Leaf, tensor: Any, axis_names: Mapping[str, str], mesh_axes: Mapping[str, int]
) -> Leaf:
    device_mesh = tensor.device_mesh
    if leaf.local:
        rule = "says itself along which axes it is local"
        _refuse(leaf, rule, "option local", "leave it out of local")
    if not device_mesh.mesh_dim_names:
        rule, remedy = (
            "must lie on a DeviceMesh whose axes have names",
            "pass init_device_mesh(mesh_dim_names=...)",
        )
        _refuse(leaf, rule, "none", remedy)
    axis_dims: dict[str, int | None] = {}
    leaf_cuts, leaf_shape = [], list(tensor.shape)
    named_placements = zip(device_mesh.mesh_dim_names, tensor.placements, strict=True)
    for device_dim, (device_axis, placement) in enumerate(named_placements):
        mesh_axis = axis_names.get(device_axis, device_axis)
        # FSDP2's usual names of data axes.
        if device_axis not in axis_names and device_axis.removeprefix("dp_") in AXES:
            mesh_axis = device_axis.removeprefix("dp_")
        if mesh_axis in AXES:
            _refuse(
                leaf,
                "must be placed along model axes only, because make_plan cuts leaves along the "
                "data axes itself",
                f"axis {device_axis!r}, the data axis {mesh_axis!r}",
                "parallelize the module over the other axes, as in device_mesh['tp'], and name an "
                "axis of a mesh of one axis, as in from_device_mesh(names={'tp': 'tensor'})",
            )
        axis_ranks = device_mesh.size(device_dim)
        if mesh_axes.get(mesh_axis) != axis_ranks:
            _refuse(
                leaf,
                f"must be placed along axes of the mesh, {dict(mesh_axes)}",
                f"axis {device_axis!r} of {axis_ranks} ranks",
                "make the mesh from the same DeviceMesh, or give it the axis, as in "
                f"init_mesh({{..., {mesh_axis!r}: {axis_ranks}}})",
            )
        # Why not is_shard: a placement that deals out slices in another order is a Shard too.
        if type(placement).__name__ not in ("Shard", "Replicate"):
            _refuse(
                leaf,
                "must be placed by Shard or Replicate",
                f"{placement} along axis {device_axis!r}",
                "call redistribute on it, with Shard or Replicate along each axis, before "
                "make_functional",
            )
        axis_dims[mesh_axis] = None
        if placement.is_shard():
            axis_dims[mesh_axis] = tensor_dim = placement.dim % tensor.ndim
            if leaf_shape[tensor_dim] % axis_ranks:
                _refuse(
                    leaf,
                    "must be cut into equal slices",
                    f"shape {tuple(tensor.shape)}, cut along dim {tensor_dim}",
                    f"choose a size that the {axis_ranks} ranks divide, or leave the module out of "
                    "the parallel plan",
                )
            leaf_shape[tensor_dim] //= axis_ranks
            leaf_cuts.append(LeafCut(mesh_axis, tensor_dim, axis_ranks))
    # Why local along an axis of one rank too, which cuts nothing: the plan is the same for more
    # ranks of it.
    return leaf._replace(
        shape=tuple(leaf_shape),
        local=tuple(
            mesh_axis for mesh_axis in mesh_axes if axis_dims.get(mesh_axis) is not None
        ),
        cuts=tuple(cut for cut in leaf_cuts if cut.ranks > 1),
        placements=tuple(axis_dims.items()),
    )


def _refuse(leaf: Leaf, rule: str, fact: str, remedy: str) -> NoReturn:
    raise ValueError(
        f"leaf {leaf.paths[0]!r} is a DTensor, which {rule}; found {fact}: {remedy}"
    )


# --- the option ``storage`` -----------------------------------------------------------------------


StorageByGlob = Mapping[str, Storage | tuple[Encode, Any] | None]


def with_packing(leaves: list[Leaf], storage: Any) -> list[Leaf]:
    """Return the leaves with the packing of those that ``storage`` matches.

    Raises:
        TypeError: ``storage`` maps no globs to pairs of functions.
        ValueError: an entry matches no frozen floating-point leaf, a leaf is a slice of a larger
            tensor, or two pairs have one name.
    """
    storages, _ = read_storages(storage)
    if not storages:
        return leaves
    packings: dict[tuple[Storage, str], Packing] = {}
    packed_leaves, used_globs = [], set()
    for leaf in leaves:
        is_frozen = not leaf.trainable and dtype_of(leaf.dtype).is_floating_point
        leaf_nodes = {node for path in leaf.paths for node in tree.upwards(path)}
        glob = last_match(storages, leaf_nodes) if is_frozen else None
        leaf_storage = None if glob is None else storages[glob]
        if leaf_storage is None:
            packed_leaves.append(leaf)
            continue
        if leaf.cuts or leaf.placements:
            raise ValueError(
                f"leaf {leaf.paths[0]!r} is a slice of a larger tensor, whose blocks would not be "
                f"those of the slices; found storage {glob!r}: leave it out, as in {{..., "
                f"{leaf.paths[0]!r}: None}}"
            )
        used_globs.add(glob)
        packing_key = leaf_storage, leaf.dtype
        if packing_key not in packings:
            packings[packing_key] = Packing.of(*packing_key)
        packed_leaves.append(leaf._replace(packing=packings[packing_key]))
    for glob, glob_storage in storages.items():
        if glob_storage is not None and glob not in used_globs:
            raise ValueError(
                f"storage {glob!r} must match frozen floating-point leaves that no other entry "
                "takes; found none: call requires_grad_(False) on the module before "
                "make_functional, or leave the entry out"
            )
    return packed_leaves


def read_storages(
    storage: Any,
) -> tuple[dict[str, Storage | None], dict[tuple[str, int], Storage]]:
    """Return the pairs of the option ``storage`` by glob; and by name and block, as plans do."""
    if storage is None:
        return {}, {}
    if not isinstance(storage, Mapping):
        raise TypeError(
            "storage must map paths or globs to pairs of functions, as in {'base': fs.nf4()}; "
            f"found {storage!r}"
        )
    storages: dict[str, Storage | None] = dict.fromkeys(storage)
    by_name: dict[tuple[str, int], Storage] = {}
    for glob, value in storage.items():
        if value is None:
            continue
        pair = Storage(*value) if isinstance(value, tuple) and len(value) == 2 else value
        if not isinstance(pair, Storage):
            raise TypeError(
                f"storage[{glob!r}] must be a pair (encode, decode) of functions, an fs.Storage, or "
                f"None; found {value!r}: pass fs.nf4(), for example"
            )
        if pair.name in built_in and pair != built_in[pair.name](pair.block):
            raise ValueError(
                f"storage[{glob!r}] has the name {pair.name!r} of a storage of the library; found "
                "other functions: pass another name, as in fs.Storage(..., name=...)"
            )
        storages[glob] = pair
        if by_name.setdefault((pair.name, pair.block), pair) != pair:
            raise ValueError(
                f"two pairs of storage have the name {pair.name!r} and blocks of {pair.block} "
                "elements, and plans tell them apart by these: pass fs.Storage(..., name=...)"
            )
    return storages, by_name
