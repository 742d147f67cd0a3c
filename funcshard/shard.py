"""``shard`` and ``gather``: the whole parameter tree to this rank's shards, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from funcshard import tree
from funcshard.flat import ravel
from funcshard.mesh import Mesh, check_same
from funcshard.plan import Plan, UnitPlan, dtype_of
from funcshard.unit import unshard

__all__ = ["Shards", "check_mesh", "check_shards", "cut", "gather", "shard"]

Shards = dict[str, dict[str, torch.Tensor]]


def shard(params: Any, plan: Plan, mesh: Mesh) -> Shards:
    """Cut a parameter tree into this rank's shards; ``gather`` is the inverse.

    Arguments:
        params: the tree that the plan was made for, with real tensors, the same on every rank.
        plan: how it is cut.
        mesh: the ranks, of the plan's shape.

    Returns:
        ``{unit name: {buffer key: shard}}``; every shard is a 1-D tensor of ``shard_numel`` elements on the mesh's
        device, in the dtype of its leaves, and shares no memory with ``params``.

    Raises:
        ValueError: the tree, a shape, a dtype or the mesh is not the plan's, a leaf is on the meta device, or the ranks'
            plans differ, which is found before any data moves.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.arange(3.0)}
        >>> def main(mesh):
        ...     return fs.shard(params, fs.make_plan(params, mesh), mesh)[""]["float32"].tolist()
        >>> fs.simulate(main, world_size=2)
        [[0.0, 1.0], [2.0, 0.0]]
    """
    check_mesh(plan, mesh)
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
    return {unit.name: cut(unit, by_path, mesh, "params") for unit in plan.unit_list}


def gather(shards: Shards, plan: Plan, mesh: Mesh) -> Any:
    """Put the whole parameter tree together on every rank; the inverse of ``shard``, and differentiable.

    Arguments:
        shards: what ``shard`` returned, or trees of the same form (gradients, averages).
        plan: the plan they were cut by.
        mesh: the ranks.

    Returns:
        The tree that the plan was made for; its tensors share no memory with the shards. The buffers are gathered one
        unit after another.

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
        f = unshard(lambda leaves: [leaf.clone() for leaf in leaves], unit.listed(), mesh)
        copies = f(shards[unit.name])
        values.update({leaf.index: copy for leaf, copy in zip(unit.leaves, copies, strict=True)})
    return tree.build(plan.structure, [values[i] for i in range(len(values))])


def cut(unit: UnitPlan, by_path: Mapping[str, torch.Tensor], mesh: Mesh, where: str) -> dict[str, torch.Tensor]:
    """Cut this rank's shard of one unit out of full leaves."""
    local = {}
    for buffer in unit.buffers:
        leaves = [by_path[leaf.path] for leaf in buffer.leaves]
        for spec, leaf in zip(buffer.leaves, leaves, strict=True):
            if tuple(leaf.shape) != spec.shape or leaf.dtype != dtype_of(buffer.dtype):
                raise ValueError(
                    f"leaf {spec.path!r} of {where} must have shape {spec.shape} and dtype {buffer.dtype}, as planned; "
                    f"found {tuple(leaf.shape)} and {str(leaf.dtype).removeprefix('torch.')}"
                )
            if leaf.is_meta:
                raise ValueError(
                    f"leaf {spec.path!r} of {where} is on the meta device and has no values to cut; initialise it first, "
                    f"as in module.to_empty(device='cpu') and an init function"
                )
        begin = mesh.shard.rank * buffer.shard_numel if buffer.shards > 1 else 0
        with torch.no_grad():
            flat = ravel(leaves, buffer)
            piece = flat[begin : begin + buffer.shard_numel]
            local[buffer.key] = piece.to(mesh.device, copy=buffer.shards > 1)
    return local


def check_mesh(plan: Plan, mesh: Mesh) -> None:
    """Raise ``ValueError`` unless every rank of ``mesh`` has the same plan, and the mesh has the plan's shape."""
    check_same(mesh, plan.fingerprint(), "the plan")  # first, so that no rank raises alone and leaves the others waiting
    if tuple(mesh.shape.values()) != plan.mesh_shape:
        replicate, shard = plan.mesh_shape
        raise ValueError(
            f"the plan was made for a mesh of {replicate} replicate × {shard} shard ranks; found {mesh.shape}: make the "
            f"plan with make_plan(params, mesh)"
        )


def check_shards(plan: Plan, shards: Any) -> None:
    """Raise ``ValueError`` unless ``shards`` has exactly the plan's units."""
    names = [unit.name for unit in plan.unit_list]
    if not isinstance(shards, Mapping) or shards.keys() != set(names):
        found = list(shards)[:6] if isinstance(shards, Mapping) else type(shards).__name__
        raise ValueError(
            f"shards must hold the units of the plan, {names[:6]}; found {found}: they were made with another plan; make "
            f"them with shard(params, plan, mesh)"
        )
