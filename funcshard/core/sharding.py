"""``shard`` and ``gather``: the whole parameter tree to this rank's shards, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from funcshard._utils import tree, untraced
from funcshard.comm import Mesh, check_same
from funcshard.core.checks import check_leaf, check_mesh, check_shards
from funcshard.core.flat_buffer import ravel
from funcshard.core.unit import unshard
from funcshard.plan import AXES, BufferPlan, LeafSpec, Plan, UnitPlan, dtype_of

__all__ = ["Shards", "cut", "empty_shard", "gather", "put", "shard"]

Shards = dict[str, dict[str, torch.Tensor]]


@untraced
def shard(params: Any, plan: Plan, mesh: Mesh, *, src: int | None = None) -> Shards:
    """Cut a parameter tree into this rank's shards; ``gather`` is the inverse.

    Arguments:
        params: the tree that the plan was made for, with real tensors, the same on every rank unless there is a ``src``.
        plan: how it is cut.
        mesh: the ranks, of the plan's shape.
        src: the rank of the world whose values every rank takes; those of other ranks may be on the meta device. They are
            broadcast one flat buffer after another. Leaves that the plan keeps local to a rank stay each rank's own; what is
            local along one axis is taken from the rank that stands along the other axis where ``src`` does.

    Returns:
        ``{unit name: {buffer key: shard}}``; every shard is a 1-D tensor of ``shard_numel`` elements on the mesh's
        device (on the CPU where the plan offloads the unit), in the dtype of its leaves, and shares no memory with
        ``params``.

    Raises:
        ValueError: the tree, a shape, a dtype or the mesh is not the plan's, a leaf is on the meta device, or the ranks'
            plans differ, which is found before any data moves. With ``src``, a fault of one rank is raised on all of them.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.arange(3.0)}
        >>> def main(mesh):
        ...     return fs.shard(params, fs.make_plan(params, mesh), mesh)[""]["float32"].tolist()
        >>> fs.simulate(main, world_size=2)
        [[0.0, 1.0], [2.0, 0.0]]
    """
    check_mesh(plan, mesh)
    if src is None:
        by_path = _by_path(params, plan)
        return {unit.name: cut(unit, by_path, mesh, "params") for unit in plan.unit_list}
    check_same(mesh, repr(src), "src")
    if type(src) is not int or not 0 <= src < mesh.world_size:
        raise ValueError(f"src must be a rank of the world, from 0 to {mesh.world_size - 1}; found {src!r}")
    by_path = _checked_together(params, plan, mesh, src)
    return {
        unit.name: {
            buffer.key: _from_rank(src, unit, buffer, [by_path[leaf.path] for leaf in buffer.leaves], mesh)
            for buffer in unit.buffers
        }
        for unit in plan.unit_list
    }


def _by_path(params: Any, plan: Plan) -> dict[str, Any]:
    _, leaves, paths = tree.describe(params)
    by_path = dict(zip(paths, leaves, strict=True))
    known = {path for leaf in plan.leaves for path in (leaf.path, *leaf.aliases)}
    missing = sorted(leaf.path for leaf in plan.leaves if leaf.path not in by_path)
    unexpected = sorted(by_path.keys() - known)
    if missing or unexpected:
        raise ValueError(
            f"params must be the tree that the plan was made for; missing: {missing[:3] or 'nothing'}, unexpected: "
            f"{unexpected[:3] or 'nothing'}: make the plan from these params"
        )
    return by_path


def _checked_together(params: Any, plan: Plan, mesh: Mesh, src: int) -> dict[str, Any]:
    """The leaves by path, checked on every rank before the first one waits for values."""
    fault: Exception | None = None
    by_path: dict[str, Any] = {}
    try:
        by_path = _by_path(params, plan)
        for unit in plan.unit_list:
            for buffer in unit.buffers:
                for leaf in buffer.leaves:
                    check_leaf(by_path[leaf.path], leaf, buffer, "params", meta=not _is_source(src, buffer, mesh))
    except (TypeError, ValueError) as error:
        fault = error
    check_same(mesh, str(fault or "no fault"), "what was found in params")
    if fault is not None:
        raise fault
    return by_path


def _from_rank(src: int, unit: UnitPlan, buffer: BufferPlan, leaves: list[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """This rank's shard of what rank ``src`` has."""
    local = empty_shard(unit, buffer, mesh)
    if mesh.world_size == 1 or buffer.local == AXES:
        for spec, leaf in zip(buffer.leaves, leaves, strict=True):
            put(local, leaf, spec, buffer, mesh)
        return local
    outer, inner = divmod(src, mesh.shard.size)
    with torch.no_grad():
        if mesh.replicate.rank != outer and "replicate" not in buffer.local:
            piece = torch.empty_like(local, device=mesh.device)
        else:
            full = torch.empty(buffer.padded_numel, dtype=local.dtype, device=mesh.device)
            if _is_source(src, buffer, mesh):
                full.copy_(ravel(leaves, buffer))
            if "shard" not in buffer.local:
                mesh.shard.broadcast(full, inner).wait()
            piece = (
                full.view(buffer.shards, -1)[mesh.shard.rank if buffer.shards > 1 else 0].clone() if full.numel() else full
            )
        if "replicate" not in buffer.local:
            mesh.replicate.broadcast(piece, outer).wait()
        return local.copy_(piece)


def _is_source(src: int, buffer: BufferPlan, mesh: Mesh) -> bool:
    """Whether this rank's values of a buffer are the ones that those who share them take."""
    places = dict(zip(AXES, divmod(src, mesh.shard.size), strict=True))
    here = {"replicate": mesh.replicate.rank, "shard": mesh.shard.rank}
    return all(axis in buffer.local or here[axis] == place for axis, place in places.items())


@untraced
def gather(shards: Shards, plan: Plan, mesh: Mesh) -> Any:
    """Put the whole parameter tree together on every rank; the inverse of ``shard``, and differentiable.

    Arguments:
        shards: what ``shard`` returned, or trees of the same form (gradients, averages).
        plan: the plan they were cut by.
        mesh: the ranks.

    Returns:
        The tree that the plan was made for, in the dtypes of its leaves, whatever precision the plan computes in; its
        tensors share no memory with the shards. The buffers are gathered one unit after another.

    Raises:
        ValueError: the shards are not of this plan or number of ranks.

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
    check_shards(plan, shards)
    values: dict[int, torch.Tensor] = {}
    for unit in plan.unit_list:
        full = unit.listed().in_full_precision()
        f = unshard(lambda leaves: [leaf.clone() for leaf in leaves], full, mesh)
        copies = f(_widened(shards[unit.name], unit))
        values.update({leaf.index: copy for leaf, copy in zip(unit.leaves, copies, strict=True)})
    return tree.build(plan.structure, [values[i] for i in range(len(values))])


def _widened(shard: Any, unit: UnitPlan) -> Any:
    """The shard in the dtypes of its leaves, where it holds gradients that were kept in the dtype of their reduction."""
    kept = {
        buffer.key: dtype_of(buffer.dtype)
        for buffer in unit.buffers
        if unit.precision is not None and unit.precision.keep_low_precision_grads
        if isinstance(shard, Mapping) and isinstance(shard.get(buffer.key), torch.Tensor)
        if shard[buffer.key].dtype == unit.reduced_dtype(buffer)
    }
    return {**shard, **{key: shard[key].to(dtype) for key, dtype in kept.items()}} if kept else shard


def cut(unit: UnitPlan, by_path: Mapping[str, torch.Tensor], mesh: Mesh, where: str) -> dict[str, torch.Tensor]:
    """Cut this rank's shard of one unit out of full leaves."""
    shard = {}
    for buffer in unit.buffers:
        for leaf in buffer.leaves:
            check_leaf(by_path[leaf.path], leaf, buffer, where)
        shard[buffer.key] = empty_shard(unit, buffer, mesh)
        for leaf in buffer.leaves:
            put(shard[buffer.key], by_path[leaf.path], leaf, buffer, mesh)
    return shard


def empty_shard(unit: UnitPlan, buffer: BufferPlan, mesh: Mesh) -> torch.Tensor:
    """Return zeros for a shard of one buffer, where the plan wants it: ``put`` fills it leaf by leaf."""
    device = torch.device("cpu") if unit.offload else mesh.device
    pinned = unit.offload and mesh.device.type == "cuda"
    return torch.zeros(buffer.shard_numel, dtype=dtype_of(buffer.dtype), device=device, pin_memory=pinned)


def put(shard: torch.Tensor, leaf: torch.Tensor, spec: LeafSpec, buffer: BufferPlan, mesh: Mesh) -> None:
    """Write what lies in this rank's slice of ``buffer`` of one full leaf into ``shard``."""
    part = buffer.part(spec, mesh.shard.rank)
    if part.numel:
        with torch.no_grad():
            shard[part.in_shard].copy_(leaf.reshape(-1)[part.in_leaf])
