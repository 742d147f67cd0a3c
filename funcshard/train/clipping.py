"""Norms of sharded trees, and clipping by them."""

from __future__ import annotations

import torch

from funcshard._utils import tree, untraced
from funcshard.comm import Mesh
from funcshard.core import Link, Shards, check_shards, psum, start_gather
from funcshard.plan import Plan

__all__ = ["clip_by_global_norm", "global_norm"]


@untraced
def global_norm(grads: Shards, plan: Plan, mesh: Mesh, norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of the whole tree that ``grads`` are the shards of, the same on every rank.

    Arguments:
        grads: a tree like the plan's shards; ``None`` leaves count as nothing.
        plan: the plan they are cut by.
        mesh: the ranks.
        norm_type: order of the norm, ``math.inf`` included.

    Returns:
        A scalar tensor, float32 or of a wider dtype of the gradients.

    Raises:
        ValueError: the order is not positive, or the tree is not of the plan's units.

    Example:
        >>> import torch, funcshard as fs
        >>> def main(mesh):
        ...     params = {"w": torch.tensor([3.0, 4.0])}
        ...     plan = fs.make_plan(params, mesh)
        ...     return fs.global_norm(fs.shard(params, plan, mesh), plan, mesh).item()
        >>> fs.simulate(main, world_size=2)
        [5.0, 5.0]

    Source: ``torch.nn.utils.get_total_norm``.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, or math.inf; found {norm_type}")
    check_shards(plan, grads)
    cut: list[torch.Tensor] = []
    whole: list[torch.Tensor] = []
    own: list[torch.Tensor] = []
    dtype = torch.float32  # of the norms of what is local: of all of it, since a rank may have nothing that counts
    for unit in plan.unit_list:
        for buffer in unit.buffers:
            leaf = grads[unit.name][buffer.key]
            if leaf is not None:
                link = Link(mesh, unit.name, buffer.key, unit.sharded, buffer.local)
                if not buffer.local:
                    (cut if unit.sharded else whole).append(leaf)
                    continue
                dtype = torch.promote_types(dtype, leaf.dtype.to_real())
                if all(group.rank == 0 for _, group in link.repeated):  # of several copies the first one counts
                    own.append(leaf)
    # over the shard axis only: along the replicate axis ranks hold the same slices
    slices = start_gather(_norm(cut, norm_type, mesh).reshape(1), Link(mesh, None, "", True)).finish()
    norms = [slices, _norm(whole, norm_type, mesh).reshape(1)]
    if any(buffer.local for unit in plan.unit_list for buffer in unit.buffers):
        mine = _norm(own, norm_type, mesh).to(dtype)
        everyones = mine.new_zeros(mesh.world_size)
        everyones[mesh.rank] = mine
        norms.append(psum(everyones, mesh))
    return torch.linalg.vector_norm(torch.cat(norms), norm_type)


@untraced
def clip_by_global_norm(
    grads: Shards, plan: Plan, mesh: Mesh, max_norm: float, norm_type: float = 2.0
) -> tuple[Shards, torch.Tensor]:
    """Scale ``grads`` so that the norm of the whole tree is at most ``max_norm``.

    Arguments:
        grads: a tree like the plan's shards.
        plan: the plan they are cut by.
        mesh: the ranks.
        max_norm: the bound.
        norm_type: order of the norm, ``math.inf`` included.

    Returns:
        ``(clipped, norm)``: a new tree like ``grads``, and the norm before clipping.

    Raises:
        ValueError: see ``global_norm``.

    Example:
        >>> import torch, funcshard as fs
        >>> def main(mesh):
        ...     params = {"w": torch.tensor([3.0, 4.0])}
        ...     plan = fs.make_plan(params, mesh)
        ...     clipped, norm = fs.clip_by_global_norm(fs.shard(params, plan, mesh), plan, mesh, max_norm=1.0)
        ...     return round(clipped[""]["float32"].item(), 4), norm.item()
        >>> fs.simulate(main, world_size=2)
        [(0.6, 5.0), (0.8, 5.0)]

    Source: ``torch.nn.utils.clip_grad_norm_``, whose 1e-6 in the denominator is kept.
    """
    norm = global_norm(grads, plan, mesh, norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return tree.map(lambda leaf: leaf * scale.to(leaf), grads), norm


def _norm(leaves: list[torch.Tensor], norm_type: float, mesh: Mesh) -> torch.Tensor:
    filled = [leaf for leaf in leaves if leaf.numel()]
    if not filled:
        return torch.zeros((), device=mesh.device)
    wide = {leaf.dtype: torch.promote_types(leaf.dtype, torch.float32) for leaf in filled}
    # a unit that is offloaded has its gradient on the CPU
    norms = [torch.linalg.vector_norm(leaf, norm_type, dtype=wide[leaf.dtype]).to(mesh.device) for leaf in filled]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)
