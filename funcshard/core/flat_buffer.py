"""Leaves and their flat buffer: from a shard to leaves, differentiably, and back to its gradient.

``ShardToLeaves`` gathers, ``LeavesToShard`` *adds* over ranks: they are exact adjoints, and the
backward of each is the other. So both can be differentiated any number of times, forwards and
backwards, and mapped with ``vmap``.

The dims of ``vmap`` come first: shards are ``[*batch, n]``, leaves ``[*batch, *shape]``, so that
leaves are views of one gathered buffer, ``[*batch, padded_numel]``, also under ``vmap``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from funcshard._utils.torch_private import dispatch_modes, signed, transforms_active, unseen
from funcshard.comm import Mesh, Topology, concatenate, slice_parts
from funcshard.core.basis import noted, noted_outer, refuse_cut, refuse_mixed_sum
from funcshard.core.buffer_comm import (
    AllGatherHandle,
    BufferComm,
    start_gather,
    start_reduce,
    start_scatter,
)
from funcshard.core.grad_reducer import current_reducer, note_collective
from funcshard.plan import BufferPlan

_log = logging.getLogger("funcshard.core")


def ravel(leaves: Sequence[torch.Tensor], buffer: BufferPlan) -> torch.Tensor:
    """Copy ``leaves`` into a new, zero-padded buffer ``[padded_numel]``; inverse of ``views``."""
    flat_leaves = [leaf.reshape(-1) for leaf in leaves]
    if buffer.packing is not None:
        flat_leaves = [buffer.packing.pack(leaf) for leaf in flat_leaves]
    padding_numel = buffer.padded_numel - buffer.numel
    return torch.cat([*flat_leaves, flat_leaves[0].new_zeros(padding_numel)])


def views(full: torch.Tensor, buffer: BufferPlan) -> list[torch.Tensor]:
    """Return the leaves of ``full``, ``[*batch, padded_numel]``; inverse of ``ravel``.

    They are views of it, or of what its bytes decode to if the leaves are packed.
    """
    if buffer.packing is not None:
        full = buffer.packing.unpack(full)
    return decoded_views(full, buffer)


def decoded_views(full: torch.Tensor, buffer: BufferPlan) -> list[torch.Tensor]:
    """Return the leaves as views of ``full``, ``[*batch, model_numel]``."""
    # narrow and view copy nothing, as the leaf is contiguous in the last dim.
    batch_shape = full.shape[:-1]
    return [
        full.narrow(-1, offset, math.prod(shape)).view(batch_shape + shape)
        for shape, _, offset in buffer.leaf_views
    ]


class ShardToLeaves(torch.autograd.Function):
    """Gather a shard, and return the leaves of its buffer; adjoint of ``LeavesToShard``.

    ``ShardToLeaves.apply(shard, comm, handle, read_only)``. ``handle`` is that of the all-gather,
    if it has started. With ``read_only``, ranks may share the memory of the leaves. Backward calls
    ``post_backward`` of the node, if that is set, when the gradients of all leaves are complete.
    """

    @staticmethod
    @signed
    @unseen
    def forward(
        shard: torch.Tensor,
        comm: BufferComm,
        handle: AllGatherHandle | None,
        read_only: bool,
    ) -> Any:
        full_buffer = (handle or start_gather(shard, comm, read_only=read_only)).finish()
        # Why ask: on one rank it is the shard itself, or a gradient in any layout.
        if full_buffer.ndim > 1 or not full_buffer.is_contiguous():
            return tuple(decoded_views(full_buffer, comm.plan))
        buffer_begin = full_buffer.storage_offset()
        # Why not ``views``: this takes half the time.
        return tuple(
            [
                full_buffer.as_strided(size, stride, buffer_begin + offset)
                for size, stride, offset in comm.leaf_views
            ]
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        shard, ctx.comm, _, ctx.read_only = inputs
        ctx.device, ctx.loop, ctx.post_backward = output[0].device, None, None
        # Why look it up here: below a transform the shard may be a leaf of the reducer, which above
        # it was not.
        ctx.reducer = current_reducer.get()
        ctx.leaf = ctx.reducer and ctx.reducer.leaf_by_id.get(id(shard))
        if transforms_active():
            ctx.comm, ctx.loop = noted(ctx.comm)
        elif ctx.leaf is None and ctx.needs_input_grad[0]:
            ctx.comm = noted_outer(ctx.comm)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        comm = ctx.comm
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("post_backward of %s", comm.label)
        # Why now, also if the unit has several buffers: autograd runs the nodes of a forward in the
        # opposite order, so every node that read one of the buffers has run before this one.
        if ctx.post_backward is not None:
            ctx.post_backward()
        if ctx.leaf is not None and ctx.reducer.in_backward:
            ctx.reducer.add(ctx.leaf, _parts(comm, ctx.device, grads)[1], comm)
            return (None,) * 4
        if ctx.leaf is not None:
            ctx.reducer.check_hooks()
        return LeavesToShard.apply(comm, ctx.device, *grads), None, None, None

    @staticmethod
    def jvp(ctx: Any, shard: torch.Tensor | None, *_: None) -> Any:
        if shard is None:
            return (None,) * len(ctx.comm.plan.leaves)
        refuse_cut(ctx.comm, ctx.loop, "column")
        return ShardToLeaves.apply(shard, ctx.comm.plain, None, ctx.read_only)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, shard: torch.Tensor, comm: BufferComm, *rest: Any
    ) -> Any:
        # Note: a leaf of the reducer is known by its identity, which a movedim would hide.
        batched_shard = shard if in_dims[0] == 0 else shard.movedim(in_dims[0], 0)
        leaves = ShardToLeaves.apply(batched_shard, comm.plain, *rest)
        return leaves, (0,) * len(leaves)


class LeavesToShard(torch.autograd.Function):
    """Sum the leaves of all ranks, and return this rank's slice; adjoint of ``ShardToLeaves``.

    ``LeavesToShard.apply(comm, device, *leaves)``: a leaf that is ``None`` counts as zeros.
    """

    @staticmethod
    @signed
    @unseen
    def forward(
        comm: BufferComm, device: torch.device, *leaves: torch.Tensor | None
    ) -> Any:
        batch_shape, parts = _parts(comm, device, leaves)
        if not comm.topology.cut:
            # Nothing is scattered, so the whole gradient is one tensor.
            full_grad = concatenate(parts).view(*batch_shape, comm.plan.padded_numel)
            return start_reduce(full_grad, comm, donated=True).finish()
        return start_scatter(parts, (*batch_shape, comm.plan.shard_numel), comm).finish()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.comm, ctx.device, *leaves = inputs
        ctx.loop = None
        # The gradient has to be None where the input was.
        ctx.has_leaf = [leaf is not None for leaf in leaves]
        if any(ctx.needs_input_grad) or transforms_active():
            ctx.comm, ctx.loop = noted(ctx.comm)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        refuse_cut(ctx.comm, ctx.loop, "row")
        # Why not read-only: autograd may add other gradients to these in place.
        leaves = ShardToLeaves.apply(grad, ctx.comm.plain, None, False)
        leaf_pairs = zip(leaves, ctx.has_leaf, strict=True)
        return None, None, *(leaf if has_leaf else None for leaf, has_leaf in leaf_pairs)

    @staticmethod
    def jvp(ctx: Any, _comm: None, _device: None, *leaves: torch.Tensor | None) -> Any:
        refuse_mixed_sum(ctx.comm, ctx.loop)
        return LeavesToShard.apply(ctx.comm.plain, ctx.device, *leaves)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, comm: BufferComm, device: Any, *leaves: torch.Tensor | None
    ) -> Any:
        batched_leaves = []
        for leaf, dim in zip(leaves, in_dims[2:], strict=True):
            # vmap does not map over this leaf, whose gradient is that of every sample.
            if leaf is not None and dim is None:
                leaf = leaf.expand(info.batch_size, *leaf.shape)
            elif leaf is not None:
                leaf = leaf.movedim(dim, 0)
            batched_leaves.append(leaf)
        return LeavesToShard.apply(comm, device, *batched_leaves), 0


def _parts(
    comm: BufferComm, device: torch.device, leaves: Sequence[torch.Tensor | None]
) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """Return the dims of vmap, and 1-D tensors that concatenate to the buffer, in rank order.

    A reduction may write to a single one, so that is never the memory of a leaf.
    """
    buffer = comm.plan
    leaf_pairs = list(zip(buffer.leaves, leaves, strict=True))
    batch_shape: tuple[int, ...] = ()
    for spec, leaf in leaf_pairs:
        if leaf is not None:
            like_tensor, batch_shape = (
                leaf,
                tuple(leaf.shape[: leaf.ndim - len(spec.shape)]),
            )
            break
    else:
        like_tensor = torch.empty(0, dtype=buffer.shard_dtype, device=device)
    # All dims of vmap are one for the reduction; without any there is none.
    row_dims = (math.prod(batch_shape),)[: len(batch_shape)]
    leaf_rows = []
    for spec, leaf in leaf_pairs:
        row_shape = (*row_dims, spec.numel)
        if leaf is None:
            leaf_row = like_tensor.new_zeros(row_shape)
        elif leaf.is_contiguous() or leaf.stride(0) == 0 or dispatch_modes():
            # Note: of a leaf that is expanded over samples, this is a view, too.
            leaf_row = leaf.reshape(row_shape)
        else:
            # Why the group's memory: the gradient of a weight comes transposed out of vmap. New
            # memory of that size would first be filled with zeros, page by page, which takes longer
            # than the copy.
            leaf_copy = (
                comm.mesh.shard.empty(leaf.numel(), leaf).view(leaf.shape).copy_(leaf)
            )
            leaf_row = leaf_copy.view(row_shape)
        leaf_rows.append(leaf_row)
    padding_numel = buffer.padded_numel - buffer.numel
    # Padding comes last in the buffer; an empty part only makes the single one two.
    if padding_numel or len(leaf_rows) == 1:
        leaf_rows.append(like_tensor.new_zeros((*row_dims, padding_numel)))
    if not batch_shape:
        return batch_shape, leaf_rows
    # With vmap each rank gets a slice of every row, so the rows are cut up by rank.
    if comm.topology.cut:
        return batch_shape, [_by_rank(leaf_rows, comm)]
    return batch_shape, [torch.cat(leaf_rows, -1).view(-1)]


def _by_rank(rows: Sequence[torch.Tensor], comm: BufferComm) -> torch.Tensor:
    """Return each rank's slices of all rows, in rank order, in one 1-D tensor."""
    shard_numel = comm.plan.shard_numel
    # A leaf may lie in the slices of several ranks, and a slice may hold several leaves.
    rank_slices = [
        slice_parts(rows, rank * shard_numel, (rank + 1) * shard_numel)
        for rank in range(comm.plan.shards)
    ]
    # Why not in the group's memory: it is real, and in a recording tensors have no data.
    if dispatch_modes():
        return torch.stack([torch.cat(slices, -1) for slices in rank_slices]).view(-1)
    shape = len(rank_slices), len(rows[0]), shard_numel
    whole = comm.mesh.shard.empty(math.prod(shape), rows[0]).view(shape)
    for rank_part, slices in zip(whole, rank_slices, strict=True):
        torch.cat(slices, -1, out=rank_part)
    return whole.view(-1)


# --- flat tensors of no unit, without autograd ----------------------------------------------------


def start_gather_flat(
    flat: torch.Tensor,
    mesh: Mesh,
    unit: str | None = None,
    buffer: str = "",
    *,
    sharded: bool = True,
    offload: bool = False,
) -> AllGatherHandle:
    """Start to join every rank's ``flat`` along the shard axis; ``finish`` returns the whole.

    Arguments:
        flat: this rank's slice ``[n]``, of any dtype.
        mesh: the ranks.
        unit: name of the unit that the data belongs to, for events and errors.
        buffer: key of its buffer, likewise.
        sharded: whether ``flat`` is a slice; if not, the result is ``flat``.
        offload: whether ``flat`` is on the CPU although the mesh is not.
    """
    note_collective(mesh)
    comm = BufferComm(Topology(mesh, sharded), unit, buffer, offload=offload)
    with torch.no_grad():
        return start_gather(flat.detach(), comm)


def all_reduce_flat(
    tensor: torch.Tensor, mesh: Mesh, *, local: tuple[str, ...] = ()
) -> torch.Tensor:
    """Return the sum of ``tensor``, which may change, over all mesh axes except ``local``."""
    note_collective(mesh)
    return start_reduce(
        tensor, BufferComm(Topology(mesh, False, local)), donated=True
    ).finish()
