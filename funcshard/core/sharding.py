"""``shard`` and ``gather``: from the whole parameter tree to this rank's shards, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from funcshard._utils import tree
from funcshard._utils.options import check_flag, module_remedy
from funcshard._utils.tensors import is_dtensor
from funcshard._utils.torch_private import untraced
from funcshard.comm import Mesh, without_collectives
from funcshard.core.checks import check_leaf, check_mesh, check_source, other_leaves
from funcshard.core.checksum import LeafChecksums, check_tie, on_every_rank
from funcshard.core.dtensor_leaves import part_as_planned
from funcshard.core.flat_buffer import ravel
from funcshard.core.plain_collectives import broadcast
from funcshard.core.unit import Unshard, check_shards, unit_comms
from funcshard.plan import (
    Box,
    BufferPlan,
    LeafSpec,
    Plan,
    UnitPlan,
    position_of,
    slice_offsets,
)

# {unit name: {buffer key: 1-D shard}}.
Shards = dict[str, dict[str, torch.Tensor]]


@untraced
def shard(
    params: Any, plan: Plan, mesh: Mesh, *, src: int | None = None, check: bool = True
) -> Shards:
    """Cut a parameter tree into this rank's shards; ``gather`` is the inverse.

    Arguments:
        params: the tree that the plan was made for, of real tensors. Unless you pass ``src``, pass
            the same values on every rank, which is checked. Of a leaf that is a slice of a larger
            tensor, pass this rank's slice; ``from_state_dict`` takes whole tensors.
        plan: the plan.
        mesh: the ranks, in the plan's shape.
        src: a rank of the world, whose values all ranks take. It broadcasts one flat buffer after
            another, and the other ranks' params may be on the meta device. A leaf is not broadcast
            along axes along which it is local.
        check: whether ranks compare checksums of their leaves, which takes a CPU core about 0.1 s
            for each GB. Pass ``False`` if the values are the same by construction, as those of a
            file that all ranks read.

    Returns:
        ``{unit name: {buffer key: shard}}``. Each shard is a 1-D tensor of ``shard_numel`` elements
        in the dtype of its leaves, on the mesh's device, or on the CPU if the plan offloads the
        unit. It shares no memory with ``params``.

    Raises:
        ValueError: the tree, a shape, a dtype or the mesh is not the plan's, a leaf is on the meta
            device, or ranks differ in a leaf that they share, the plan, ``src`` or ``check``. Every
            rank raises.
        TypeError: a leaf is not a tensor.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.arange(3.0)}
        >>> def main(mesh):
        ...     return fs.shard(params, fs.make_plan(params, mesh), mesh)[""]["float32"].tolist()
        >>> fs.simulate(main, world_size=2)
        [[0.0, 1.0], [2.0, 0.0]]
    """
    check_flag("check", check)
    check_mesh(plan, mesh, {"the options of shard": f"src={src!r}, check={check!r}"})
    if src is not None:
        return _shard_from_rank(params, plan, mesh, src)
    checksums = LeafChecksums(
        mesh,
        "params",
        "call torch.manual_seed(0) on every rank before it builds the model, or pass src=0",
    )
    # Why after cutting: a rank can cut while others still read their leaves for the checksums.
    with on_every_rank(mesh, checksums):
        by_path = _checked_leaves(params, plan, mesh, None, checksums if check else None)
        return {unit.name: cut(unit, by_path, mesh, None) for unit in plan.unit_list}


def _shard_from_rank(params: Any, plan: Plan, mesh: Mesh, src: int) -> Shards:
    check_source(src, mesh)
    # Why before any broadcast: a rank that raised alone would leave the ranks that wait for it.
    with on_every_rank(mesh):
        by_path = _checked_leaves(params, plan, mesh, src)
    own_shards: Shards = {}
    for unit in plan.unit_list:
        own_shards[unit.name] = {}
        for buffer in unit.buffers:
            leaves = [by_path[leaf.path] for leaf in buffer.leaves]
            own_shards[unit.name][buffer.key] = cut_from_rank(
                src, unit, buffer, leaves, mesh
            )
    return own_shards


def _checked_leaves(
    params: Any,
    plan: Plan,
    mesh: Mesh,
    src: int | None,
    checksums: LeafChecksums | None = None,
) -> dict[str, Any]:
    """Return the leaves by path, of DTensors this rank's part, after checking them.

    Arguments:
        params: the tree.
        plan: the plan.
        mesh: the ranks.
        src: the rank that broadcasts its values, if one does.
        checksums: where to add the checksum of each leaf, if anywhere.
    """
    _, leaves, paths = tree.describe(params)
    by_path: dict[str, Any] = dict(zip(paths, leaves, strict=True))
    if difference := other_leaves(by_path, plan):
        # The usual mistakes are a module and shards.
        remedy = module_remedy(params, "params") or "make the plan from these params"
        if isinstance(params, Mapping) and params.keys() == plan.units.keys():
            remedy = (
                "these are shards already; gather(shards, plan, mesh) returns full parameters, to "
                "cut by another plan"
            )
        raise ValueError(
            f"params must be the tree that the plan was made for; {difference}: {remedy}"
        )
    for buffer in [buffer for unit in plan.unit_list for buffer in unit.buffers]:
        # Other ranks' values are replaced, so they need none.
        meta = src is not None and not _is_source(src, buffer, mesh)
        for leaf in buffer.leaves:
            value = by_path[leaf.path]
            if leaf.placements and is_dtensor(value):
                by_path[leaf.path] = value = part_as_planned(leaf, value, mesh, "params")
            check_leaf(value, leaf, buffer, "params", meta=meta)
            if leaf.aliases:
                check_tie(leaf, by_path, "params")
            if checksums is not None:
                checksums.add(leaf.path, value, buffer.local)
    return by_path


def cut_from_rank(
    src: int, unit: UnitPlan, buffer: BufferPlan, leaves: Sequence[torch.Tensor], mesh: Mesh
) -> torch.Tensor:
    """Return this rank's shard of the full leaves of rank ``src``; every rank has to call."""
    local_shard = empty_shard(unit, buffer, mesh)
    if mesh.world_size == 1 or all(axis in buffer.local for axis, _ in mesh.axes):
        for spec, leaf in zip(buffer.leaves, leaves, strict=True):
            put(local_shard, leaf, spec, buffer, mesh)
        return local_shard
    source_position = position_of(src, mesh.shape)
    # Ranks along these axes hold copies of the same shard.
    repeated_axes = [
        axis for axis in mesh.groups if axis != "shard" and axis not in buffer.local
    ]
    with torch.no_grad():
        # This rank gets its shard from a copy, not from the source's row.
        if any(mesh.groups[axis].rank != source_position[axis] for axis in repeated_axes):
            shard_values = torch.empty_like(local_shard, device=mesh.device)
        else:
            full_buffer = torch.empty(
                buffer.padded_numel, dtype=local_shard.dtype, device=mesh.device
            )
            if _is_source(src, buffer, mesh):
                full_buffer.copy_(ravel(leaves, buffer))
            if "shard" not in buffer.local:
                broadcast(full_buffer, src, mesh, ["shard"])
            shard_index = mesh.shard.rank if buffer.shards > 1 else 0
            shard_values = full_buffer.view(buffer.shards, buffer.shard_numel)[shard_index]
        if repeated_axes:
            broadcast(shard_values, src, mesh, repeated_axes)
        return local_shard.copy_(shard_values)


def _is_source(src: int, buffer: BufferPlan, mesh: Mesh) -> bool:
    """Return whether this rank broadcasts its values of a buffer."""
    source_position = position_of(src, mesh.shape)
    # Note: a rank that differs from ``src`` along local axes alone has values of its own to send.
    return all(
        axis in buffer.local or mesh.groups[axis].rank == index
        for axis, index in source_position.items()
    )


@untraced
def gather(shards: Shards, plan: Plan, mesh: Mesh) -> Any:
    """Gather the whole parameter tree on every rank; differentiable, and the inverse of ``shard``.

    The units are gathered one after another, in the dtypes of the plan's leaves, whatever its
    precision.

    Arguments:
        shards: your shards, or a tree of the same form, such as gradients or averages. Frozen
            shards may be ``None``, as among gradients.
        plan: the plan that the shards were made with.
        mesh: the ranks.

    Returns:
        The tree that the plan was made for, with the keys of dictionaries in its order, and
        parameters from ``make_functional`` in the order of the module's state dict. It shares no
        memory with the shards. A leaf that is local along a mesh axis has this rank's values;
        ``to_state_dict`` joins slices.

    Raises:
        ValueError: the shards were made with another plan, or for another number of ranks.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.arange(3.0)}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     return fs.gather(fs.shard(params, plan, mesh), plan, mesh)["w"].tolist()
        >>> fs.simulate(main, world_size=2)
        [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]
    """
    check_mesh(plan, mesh)
    check_shards(plan, shards, mesh, gradients=True)
    mesh = without_collectives(mesh)  # the values themselves, not as units send them
    leaf_values: dict[int, torch.Tensor] = {}
    for unit in plan.unit_list:
        shard = shards[unit.name]
        buffers = tuple(
            [buffer for buffer in unit.buffers if shard[buffer.key] is not None]
        )
        # Why a cast: gradients may be in reduce_dtype.
        held_shards = {b.key: shard[b.key].to(b.shard_dtype) for b in buffers}
        # A unit of the buffers that are there, without casts.
        full_unit = dataclasses.replace(unit, buffers=buffers).in_full_precision()
        comms = unit_comms(full_unit, mesh, None)
        f = Unshard(
            lambda leaves, _: [*map(torch.clone, leaves)],
            full_unit,
            mesh,
            comms,
            listed=True,
        )
        leaf_copies = f(held_shards) if held_shards else []
        leaf_values.update(
            {
                leaf.index: copy
                for leaf, copy in zip(full_unit.leaves, leaf_copies, strict=True)
            }
        )
    return tree.build(
        plan.ordered_structure, [leaf_values.get(i) for i in range(len(plan.leaves))]
    )


def cut(
    unit: UnitPlan,
    by_path: Mapping[str, torch.Tensor],
    mesh: Mesh,
    where: str | None,
    *,
    whole: bool = False,
    cast: bool | None = None,
) -> dict[str, torch.Tensor]:
    """Return this rank's shard of one unit, cut out of full leaves.

    Arguments:
        unit: the unit.
        by_path: the full leaves by path.
        mesh: the ranks.
        where: a name for the tree of leaves, for errors; ``None``: they have been checked.
        whole: whether slices of larger tensors are given as these whole tensors.
        cast: as in ``check_leaf``.
    """
    shard: dict[str, torch.Tensor] = {}
    for buffer in unit.buffers:
        shard[buffer.key] = empty_shard(unit, buffer, mesh)
        for spec in buffer.leaves:
            leaf = by_path[spec.path]
            if where is not None:
                check_leaf(leaf, spec, buffer, where, whole=whole, cast=cast)
            (put_whole if whole else put)(shard[buffer.key], leaf, spec, buffer, mesh)
    return shard


def empty_shard(unit: UnitPlan, buffer: BufferPlan, mesh: Mesh) -> torch.Tensor:
    """Return a new shard of one buffer, on the plan's device, with zeros as padding."""
    # Note: ``put`` has to write every leaf.
    shard = torch.empty(
        buffer.shard_numel,
        dtype=buffer.shard_dtype,
        device="cpu" if unit.offload else mesh.device,
        pin_memory=unit.offload and mesh.device.type == "cuda",
    )
    # Only the padding: put writes the rest.
    if buffer.padded_numel > buffer.numel:
        shard[buffer.filled(mesh.shard.rank) :].zero_()
    return shard


def put(
    shard: torch.Tensor, leaf: torch.Tensor, spec: LeafSpec, buffer: BufferPlan, mesh: Mesh
) -> None:
    """Copy what a full leaf has in this rank's shard of ``buffer`` into ``shard``."""
    begin, end, in_shard = buffer.part(spec, mesh.shard.rank)
    if begin == end:
        return
    packing = buffer.packing
    if packing is not None:
        begin, end = packing.numel_of(begin), packing.numel_of(end)
    with torch.no_grad():
        if not leaf.is_contiguous():
            # Why by rows: of a slice, only these are copied.
            row_numel = leaf[0].numel()
            first_row = begin // row_numel
            leaf = leaf[first_row : -(-end // row_numel)]
            begin, end = begin - first_row * row_numel, end - first_row * row_numel
        leaf_values = leaf.reshape(-1)[begin:end]
        if packing is not None:
            leaf_values = packing.pack(leaf_values.to(shard.device))
        shard[in_shard].copy_(leaf_values)


def put_whole(
    shard: torch.Tensor, whole: torch.Tensor, spec: LeafSpec, buffer: BufferPlan, mesh: Mesh
) -> None:
    """Copy what the whole tensor of a leaf has in this rank's shard into ``shard``."""
    if spec.cuts:
        slice_origin = slice_offsets(spec.shape, spec.cuts, mesh.position)
        whole = whole[Box(slice_origin, spec.shape).slices]
    put(shard, whole, spec, buffer, mesh)
