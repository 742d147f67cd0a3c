"""Leaves that are slices of whole tensors: to send a whole tensor as slices, and to join slices.

The slices of one whole tensor lie on the ranks along the mesh axes of its cuts.
"""

from __future__ import annotations

import torch

from funcshard.comm import Mesh
from funcshard.core.axis_comm import AxisComm
from funcshard.core.grad_reducer import note_collective
from funcshard.plan import Box, LeafSpec, position_of, slice_offsets


def join_slices(
    leaf: torch.Tensor, spec: LeafSpec, mesh: Mesh, *, first_only: bool = False
) -> torch.Tensor | None:
    """Return the whole tensor of a leaf, joined from the slices of all ranks, without autograd.

    The ranks along the axes of the cuts have to call. A leaf without cuts is its own whole tensor.

    Arguments:
        leaf: this rank's slice.
        spec: the leaf's entry in the plan.
        mesh: the ranks.
        first_only: whether only the first of these ranks needs the whole tensor; other ranks then
            get ``None``.
    """
    value = leaf.detach()
    for cut in reversed(spec.cuts):  # the innermost slices first
        if cut.ranks == 1:
            continue
        note_collective(mesh)
        with torch.no_grad():
            slices = AxisComm("all_gather", mesh, cut.axis, f"join leaf {spec.path!r}").run(
                value.to(mesh.device)
            )
            if first_only and mesh.groups[cut.axis].rank:
                return None
            value = torch.cat(slices.unbind(), cut.dim)
    return value


def slice_from_rank(src: int, whole: torch.Tensor, spec: LeafSpec, mesh: Mesh) -> torch.Tensor:
    """Return this rank's slice of the whole tensor that rank ``src`` has; every rank has to call.

    Only ranks whose index along every other axis is that of ``src`` get the values, because only
    they send them on. All other ranks get a tensor on the meta device.

    Arguments:
        src: the rank.
        whole: the whole tensor on rank ``src``; elsewhere any tensor of its dtype.
        spec: the leaf's entry in the plan.
        mesh: the ranks.
    """
    cuts = [cut for cut in spec.cuts if cut.ranks > 1]
    if not cuts:
        return whole
    source, axes = position_of(src, mesh.shape), [cut.axis for cut in cuts]
    if any(group.rank != source[axis] for axis, group in mesh.groups.items() if axis not in axes):
        return torch.empty(spec.shape, dtype=whole.dtype, device="meta")
    with torch.no_grad():
        full = torch.empty(spec.whole_shape, dtype=whole.dtype, device=mesh.device)
        if mesh.rank == src:
            full.copy_(whole)
        broadcast(full, src, mesh, axes)
        return full[Box(slice_offsets(spec.shape, cuts, mesh.position), spec.shape).slices].clone()


def broadcast(
    tensor: torch.Tensor, src: int, mesh: Mesh, axes: list[str] | None = None, *, label: str = ""
) -> None:
    """Replace ``tensor`` by that of rank ``src`` on the ranks along ``axes``, by default on all.

    Arguments:
        tensor: a contiguous tensor, of the same shape and dtype on every rank.
        src: the rank.
        mesh: the ranks.
        axes: the axes; the index of every calling rank along other axes is that of ``src``.
        label: a name for the tensor, for errors.
    """
    source = position_of(src, mesh.shape)
    later = list(mesh.groups) if axes is None else list(axes)
    while later:
        axis = later.pop(0)
        if all(mesh.groups[axis_name].rank == source[axis_name] for axis_name in later):
            mesh.groups[axis].broadcast(tensor, source[axis], label=label).wait()
