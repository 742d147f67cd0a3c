"""Leaves and their flat buffer: from a shard to leaves, differentiably, and back to its gradient.

``ShardToLeaves`` and ``LeavesToShard`` are exact adjoints: one gathers, the other *adds* over
ranks. (The mean over ranks is taken in one place, by ``value_and_grad``.) The backward of each is
the other, so they can be differentiated any number of times, forwards and backwards, and mapped
with ``vmap``.

The dims of ``vmap`` come first: shards are ``[*batch, n]``, leaves ``[*batch, *shape]``. So leaves
are views of one gathered buffer, ``[*batch, padded_numel]``, in the layout that ``vmap`` of plain
tensors gives them. The gradients of leaves are copied once, to where the reduction reads them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from funcshard._utils import dispatch_modes, signed, transforms_active, unseen
from funcshard.core.basis import noted, noted_outer, refuse_cut, refuse_mixed_sum
from funcshard.core.buffer_comm import (
    AllGatherHandle,
    BufferComm,
    start_gather,
    start_reduce,
    start_scatter,
)
from funcshard.core.grad_reducer import expect_gradient, take_slot
from funcshard.plan import BufferPlan, dtype_of

_log = logging.getLogger("funcshard.core")


# Size, stride and offset of each leaf in its flat buffer.
LeafViews = tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]


def ravel(leaves: Sequence[torch.Tensor], buffer: BufferPlan) -> torch.Tensor:
    """Copy ``leaves`` into a new, zero-padded buffer ``[padded_numel]``; inverse of ``views``."""
    parts = [leaf.reshape(-1) for leaf in leaves]
    padding = buffer.padded_numel - buffer.numel
    return torch.cat([*parts, parts[0].new_zeros(padding)])


def views(full: torch.Tensor, buffer: BufferPlan) -> list[torch.Tensor]:
    """Return the leaves of ``buffer`` as views of ``full``, ``[padded_numel, ...]``.

    The inverse is ``ravel``. ``vmap`` adds dims to ``full`` after the first; they become the last
    dims of the leaves.
    """
    row_shape = full.shape[1:]
    return [
        full.narrow(0, leaf.offset, leaf.numel).view(leaf.shape + row_shape)
        for leaf in buffer.leaves
    ]


def leaf_views(buffer: BufferPlan) -> LeafViews:
    """Return size, stride and offset of each leaf in the flat buffer, for ``views_at``."""
    views_by_leaf = []
    for leaf in buffer.leaves:
        stride = [1]
        for size in reversed(leaf.shape[1:]):
            stride.append(stride[-1] * max(size, 1))
        views_by_leaf.append((leaf.shape, tuple(reversed(stride[: len(leaf.shape)])), leaf.offset))
    return tuple(views_by_leaf)


def views_at(full: torch.Tensor, where: LeafViews) -> list[torch.Tensor]:
    """Return the leaves as ``views`` does, for a 1-D ``full``, in half the time."""
    begin = full.storage_offset()
    return [full.as_strided(size, stride, begin + offset) for size, stride, offset in where]


def gather_leaves(
    shard: torch.Tensor,
    comm: BufferComm,
    buffer: BufferPlan,
    where: LeafViews,
    post_backward: Callable[[], None] | None,
    handle: AllGatherHandle | None,
) -> tuple[torch.Tensor, ...]:
    """Gather ``shard`` and return the leaves of its buffer as views of the gathered buffer.

    Arguments:
        shard: this rank's shard.
        comm: the communication of the buffer.
        buffer: its plan.
        where: the ``leaf_views`` of the buffer.
        post_backward: called in backward when the gradients of all leaves are complete, so that
            the unit's buffers can be freed.
        handle: that of the all-gather, if it has started.
    """
    leaves: tuple[torch.Tensor, ...] = ShardToLeaves.apply(
        shard, buffer, where, comm, post_backward, handle, transforms_active()
    )
    expect_gradient(shard, leaves[0])
    return leaves


class ShardToLeaves(torch.autograd.Function):
    """Gather a shard, and return the leaves of its buffer; adjoint of ``LeavesToShard``.

    ``ShardToLeaves.apply(shard, buffer, where, comm, post_backward, handle, read_only)``: see
    ``gather_leaves``. With ``read_only``, ranks may share the memory of the leaves.
    """

    @staticmethod
    @signed
    @unseen
    def forward(
        shard: torch.Tensor,
        buffer: BufferPlan,
        where: LeafViews,
        comm: BufferComm,
        post_backward: Callable[[], None] | None,
        handle: AllGatherHandle | None,
        read_only: bool,
    ) -> Any:
        full = (handle or start_gather(shard, comm, read_only=read_only, last=True)).finish()
        batch = full.shape[:-1]
        # On one rank it is the shard, or a gradient in any layout.
        if not batch and full.is_contiguous():
            return tuple(views_at(full, where))
        return tuple(
            [
                full.narrow(-1, leaf.offset, leaf.numel).view(batch + leaf.shape)
                for leaf in buffer.leaves
            ]
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        shard, ctx.buffer, ctx.where, comm, ctx.post_backward, _, ctx.read_only = inputs
        ctx.device = output[0].device
        ctx.slot = take_slot(shard)
        ctx.comm, ctx.loop = comm, None
        if transforms_active():
            ctx.comm, ctx.loop = noted(comm)
        elif ctx.slot is None and ctx.needs_input_grad[0]:
            ctx.comm = noted_outer(comm)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("post_backward of %s", ctx.comm.label)
        # Why now, also if the unit has several buffers: autograd runs the nodes of a forward in the
        # opposite order, so every node that read one of the buffers has run before this one.
        if ctx.post_backward is not None:
            ctx.post_backward()
        if ctx.slot is not None and ctx.slot.reducer.takes_gradients():
            ctx.slot.reducer.add(
                ctx.slot.leaf, _rows(ctx.buffer, ctx.comm, ctx.device, grads)[1], ctx.comm
            )
            return (None,) * 7
        shard_grad = LeavesToShard.apply(ctx.buffer, ctx.comm, ctx.device, *grads)
        return shard_grad, *(None,) * 6

    @staticmethod
    def jvp(ctx: Any, shard: torch.Tensor | None, *_: None) -> Any:
        if shard is None:
            return (None,) * len(ctx.buffer.leaves)
        refuse_cut(ctx.comm, ctx.loop, "column")
        return ShardToLeaves.apply(
            shard, ctx.buffer, ctx.where, ctx.comm.plain, None, None, ctx.read_only
        )

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        shard: torch.Tensor,
        buffer: BufferPlan,
        where: LeafViews,
        comm: BufferComm,
        *rest: Any,
    ) -> Any:
        first = shard.movedim(in_dims[0], 0)
        leaves = ShardToLeaves.apply(first, buffer, where, comm.plain, *rest)
        return leaves, (0,) * len(leaves)


class LeavesToShard(torch.autograd.Function):
    """Sum the leaves of all ranks, and return this rank's slice; adjoint of ``ShardToLeaves``.

    ``LeavesToShard.apply(buffer, comm, device, *leaves)``: a leaf that is ``None`` counts as zeros.
    """

    @staticmethod
    @signed
    @unseen
    def forward(
        buffer: BufferPlan, comm: BufferComm, device: torch.device, *leaves: torch.Tensor | None
    ) -> Any:
        batch, rows = _rows(buffer, comm, device, leaves)
        if not comm.topology.cut:
            full = torch.cat(rows, -1).view(*batch, buffer.padded_numel)
            return start_reduce(full, comm, donated=True).finish()
        n = buffer.padded_numel // buffer.shards
        parts = _by_rank(rows, n, buffer.shards) if batch else rows
        return start_scatter(parts, (*batch, n), comm).finish()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.buffer, comm, ctx.device, *leaves = inputs
        ctx.has_leaf = [leaf is not None for leaf in leaves]
        ctx.comm, ctx.loop = (
            noted(comm) if any(ctx.needs_input_grad) or transforms_active() else (comm, None)
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        refuse_cut(ctx.comm, ctx.loop, "row")
        # Why not read-only: autograd may add other gradients to these in place.
        leaves = ShardToLeaves.apply(
            grad, ctx.buffer, leaf_views(ctx.buffer), ctx.comm.plain, None, None, False
        )
        pairs = zip(leaves, ctx.has_leaf, strict=True)
        return None, None, None, *(leaf if has_leaf else None for leaf, has_leaf in pairs)

    @staticmethod
    def jvp(
        ctx: Any, _buffer: None, _comm: None, _device: None, *leaves: torch.Tensor | None
    ) -> Any:
        refuse_mixed_sum(ctx.comm, ctx.loop)
        return LeavesToShard.apply(ctx.buffer, ctx.comm.plain, ctx.device, *leaves)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        buffer: BufferPlan,
        comm: BufferComm,
        device: Any,
        *leaves: torch.Tensor | None,
    ) -> Any:
        first = []
        for leaf, dim in zip(leaves, in_dims[3:], strict=True):
            if leaf is not None and dim is None:
                leaf = leaf.expand(info.batch_size, *leaf.shape)
            elif leaf is not None:
                leaf = leaf.movedim(dim, 0)
            first.append(leaf)
        return LeavesToShard.apply(buffer, comm, device, *first), 0


def _rows(
    buffer: BufferPlan,
    comm: BufferComm,
    device: torch.device,
    leaves: Sequence[torch.Tensor | None],
) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """Return the dims of vmap, and the tensors that lie side by side in the buffer.

    Each tensor is ``[numel]``, or ``[rows, numel]`` if there are dims of vmap. There are at least
    two, because a single one would be taken for memory that a reduction may write to.
    """
    like, batch = torch.empty(0, dtype=dtype_of(buffer.dtype), device=device), tuple[int, ...]()
    for spec, leaf in zip(buffer.leaves, leaves, strict=True):
        if leaf is not None:
            like, batch = leaf, tuple(leaf.shape[: leaf.ndim - len(spec.shape)])
            break
    first = (math.prod(batch),) if batch else ()
    rows = [
        like.new_zeros((*first, spec.numel))
        if leaf is None
        else _flat(leaf, (*first, spec.numel), comm)
        for spec, leaf in zip(buffer.leaves, leaves, strict=True)
    ]
    padding = buffer.padded_numel - buffer.numel
    return batch, [*rows, like.new_zeros((*first, padding))] if padding or len(rows) == 1 else rows


def _flat(leaf: torch.Tensor, shape: tuple[int, ...], comm: BufferComm) -> torch.Tensor:
    """Return ``leaf`` in another shape, as a copy if its layout asks for one."""
    if leaf.is_contiguous() or leaf.stride(0) == 0 or dispatch_modes():
        return leaf.reshape(shape)
    # Why the group's memory: the gradient of a weight comes transposed out of vmap. New memory of
    # that size would first be filled with zeros, page by page, which takes longer than the copy.
    return comm.mesh.shard.empty(leaf.numel(), leaf).view(leaf.shape).copy_(leaf).view(shape)


def _by_rank(rows: Sequence[torch.Tensor], n: int, ranks: int) -> list[torch.Tensor]:
    """Return 1-D tensors whose concatenation is each rank's slices of all rows, in rank order."""
    slices: list[list[Sequence[torch.Tensor]]] = [[] for _ in range(ranks)]
    offset = 0
    for row in rows:
        end = offset + row.shape[-1]
        for rank in range(offset // n, -(-end // n)) if n else ():
            begin = max(rank * n, offset)
            slices[rank].append(
                row[:, begin - offset : min((rank + 1) * n, end) - offset].unbind(0)
            )
        offset = end
    return [
        part for rank_rows in slices for columns in zip(*rank_rows, strict=True) for part in columns
    ]
