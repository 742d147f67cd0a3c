"""Leaves and their flat buffer, differentiably: from a shard to leaves, and back to its gradient.

Two pairs of autograd Functions are exact adjoints, each one's backward applying the other, so they
can be differentiated any number of times, forwards and backwards, under ``torch.func`` and
``vmap``:

- ``AllGather`` (shard to gathered buffer) and ``ReduceScatter``, which *adds* over ranks. The mean
  over ranks is taken in one place, by ``value_and_grad``.
- ``Unflatten`` (gathered buffer to leaves) and ``Flatten``. The leaves are views, so nothing is
  copied out; ``Flatten`` writes the leaves' gradients side by side into one new buffer.

``gather_leaves`` does the work of the first of each pair in one fused Function, because an autograd
node costs as much host time as the whole forward of a small unit. The pairs serve second gradients
and tangents of that Function. Under transforms, ``shard_to_leaves`` takes its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from funcshard._utils import signed, transforms_active, unseen
from funcshard.core.basis import noted, noted_outer, refuse_columns, refuse_mixed_sum, refuse_rows
from funcshard.core.buffer_comm import AnyGatherHandle, BufferComm, start_gather, start_reduce
from funcshard.core.grad_reducer import expect_gradient, take_slot
from funcshard.core.shard_to_leaves import ShardToLeaves, TransformedLeaves
from funcshard.plan import BufferPlan, dtype_of

__all__ = [
    "AllGather", "Flatten", "LeafViews", "ReduceScatter", "Unflatten", "flatten_gradients", "gather_leaves",
    "gradient_parts", "leaf_views", "ravel", "views", "views_at",
]  # fmt: skip

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
    rest = full.shape[1:]
    return [full.narrow(0, leaf.offset, leaf.numel).view(leaf.shape + rest) for leaf in buffer.leaves]


def leaf_views(buffer: BufferPlan) -> LeafViews:
    """Return size, stride and offset of each leaf in the flat buffer, for ``views_at``."""
    found = []
    for leaf in buffer.leaves:
        stride = [1]
        for size in reversed(leaf.shape[1:]):
            stride.append(stride[-1] * max(size, 1))
        found.append((leaf.shape, tuple(reversed(stride[: len(leaf.shape)])), leaf.offset))
    return tuple(found)


def views_at(full: torch.Tensor, where: LeafViews) -> list[torch.Tensor]:
    """Return the leaves as ``views`` does, for a 1-D ``full``, in half the time."""
    begin = full.storage_offset()
    return [full.as_strided(size, stride, begin + offset) for size, stride, offset in where]


class Unflatten(torch.autograd.Function):
    """``Unflatten.apply(full, buffer)``: the leaves as views of ``full``; adjoint: ``Flatten``."""

    @staticmethod
    @signed
    def forward(full: torch.Tensor, buffer: BufferPlan) -> Any:
        return tuple(views(full, buffer))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        full, ctx.buffer = inputs
        ctx.device = full.device
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return flatten_gradients(ctx.buffer, ctx.device, grads), None

    @staticmethod
    def jvp(ctx: Any, full: torch.Tensor | None, *_: None) -> Any:
        return None if full is None else Unflatten.apply(full, ctx.buffer)

    @staticmethod
    def vmap(info: Any, in_dims: Any, full: torch.Tensor, buffer: BufferPlan) -> Any:
        leaves = Unflatten.apply(full.movedim(in_dims[0], -1).contiguous(), buffer)
        return leaves, tuple(leaf.ndim - 1 for leaf in leaves)


def flatten_gradients(buffer: BufferPlan, device: torch.device, leaves: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Apply ``Flatten`` in backward; add an autograd node only if backward is differentiated."""
    if torch.is_grad_enabled() or transforms_active():
        return Flatten.apply(buffer, device, *leaves)
    return Flatten.forward(buffer, device, *leaves)


def gradient_parts(buffer: BufferPlan, device: torch.device, leaves: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return at least two 1-D tensors whose concatenation is the result of ``Flatten``."""
    first = next((i for i, leaf in enumerate(leaves) if leaf is not None), None)
    like = torch.empty(0, dtype=dtype_of(buffer.dtype), device=device) if first is None else leaves[first]
    assert like is not None
    rest = () if first is None else like.shape[len(buffer.leaves[first].shape) :]  # added by vmap
    parts = [
        like.new_zeros((spec.numel, *rest)) if leaf is None else leaf.reshape((spec.numel, *rest))
        for spec, leaf in zip(buffer.leaves, leaves, strict=True)
    ]
    padding = buffer.padded_numel - buffer.numel
    return [*parts, like.new_zeros((padding, *rest))] if padding or len(parts) == 1 else parts


class Flatten(torch.autograd.Function):
    """``Flatten.apply(buffer, device, *leaves)``: return a flat buffer ``[padded_numel]``.

    The adjoint is ``Unflatten``. A leaf that is ``None`` counts as zeros.
    """

    @staticmethod
    @signed
    def forward(buffer: BufferPlan, device: torch.device, *leaves: torch.Tensor | None) -> Any:
        return torch.cat(gradient_parts(buffer, device, leaves))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.buffer, ctx.device, *leaves = inputs
        ctx.given = [leaf is not None for leaf in leaves]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        leaves = Unflatten.apply(grad, ctx.buffer)
        return None, None, *(leaf if given else None for leaf, given in zip(leaves, ctx.given, strict=True))

    @staticmethod
    def jvp(ctx: Any, _buffer: None, _device: None, *leaves: torch.Tensor | None) -> Any:
        return Flatten.apply(ctx.buffer, ctx.device, *leaves)

    @staticmethod
    def vmap(info: Any, in_dims: Any, buffer: BufferPlan, device: torch.device, *leaves: torch.Tensor | None) -> Any:
        last = [
            leaf
            if leaf is None
            else leaf.unsqueeze(-1).expand(*leaf.shape, info.batch_size)
            if dim is None
            else leaf.movedim(dim, -1)
            for leaf, dim in zip(leaves, in_dims[2:], strict=True)
        ]
        out = Flatten.apply(buffer, device, *last)
        return out, out.ndim - 1


class AllGather(torch.autograd.Function):
    """Gather ``[n, ...]`` of every rank into ``[n * ranks, ...]``; adjoint of ``ReduceScatter``.

    ``AllGather.apply(shard, comm)``.
    """

    @staticmethod
    @signed
    @unseen
    def forward(shard: torch.Tensor, comm: BufferComm) -> Any:
        out = start_gather(shard, comm).finish()
        return shard.view_as(shard) if out is shard else out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, comm = inputs
        ctx.comm, ctx.loop = noted(comm) if transforms_active() else (comm, None)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ReduceScatter.apply(grad, ctx.comm), None

    @staticmethod
    def jvp(ctx: Any, shard: torch.Tensor, *_: None) -> Any:
        refuse_columns(ctx.comm, ctx.loop)
        return AllGather.apply(shard, ctx.comm.plain)

    @staticmethod
    def vmap(info: Any, in_dims: Any, shard: torch.Tensor, comm: BufferComm) -> Any:
        out = AllGather.apply(shard.movedim(in_dims[0], -1), comm.plain)
        return out, out.ndim - 1


class ReduceScatter(torch.autograd.Function):
    """Sum ``[n * ranks, ...]`` into each rank's ``[n, ...]``; the adjoint is ``AllGather``."""

    @staticmethod
    @signed
    @unseen
    def forward(full: torch.Tensor, comm: BufferComm) -> Any:
        out = start_reduce(full, comm).finish()
        return full.view_as(full) if out is full else out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, comm = inputs
        ctx.comm, ctx.loop = noted(comm) if ctx.needs_input_grad[0] or transforms_active() else (comm, None)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        refuse_rows(ctx.comm, ctx.loop)
        return AllGather.apply(grad, ctx.comm.plain), None

    @staticmethod
    def jvp(ctx: Any, full: torch.Tensor, *_: None) -> Any:
        refuse_mixed_sum(ctx.comm, ctx.loop)
        return ReduceScatter.apply(full, ctx.comm.plain)

    @staticmethod
    def vmap(info: Any, in_dims: Any, full: torch.Tensor, comm: BufferComm) -> Any:
        out = ReduceScatter.apply(full.movedim(in_dims[0], -1), comm)
        return out, out.ndim - 1


def gather_leaves(
    shard: torch.Tensor,
    comm: BufferComm,
    buffer: BufferPlan,
    where: LeafViews,
    post_backward: Callable[[], None] | None,
    handle: AnyGatherHandle | None,
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
    leaves: tuple[torch.Tensor, ...]
    if transforms_active():
        leaves = TransformedLeaves(ShardToLeaves.apply(shard, buffer, comm, post_backward, handle, True))
    else:
        leaves = _GatherLeaves.apply(shard, comm, buffer, where, post_backward, handle)
    expect_gradient(shard, leaves[0])
    return leaves


class _GatherLeaves(torch.autograd.Function):
    """``AllGather`` and ``Unflatten`` as one node, with their adjoints in a double backward."""

    @staticmethod
    def forward(
        ctx: Any,
        shard: torch.Tensor,
        comm: BufferComm,
        buffer: BufferPlan,
        where: LeafViews,
        post_backward: Callable[[], None] | None,
        handle: AnyGatherHandle | None,
    ) -> Any:
        full = (handle or start_gather(shard, comm)).finish()
        ctx.buffer, ctx.post_backward, ctx.device = buffer, post_backward, full.device
        ctx.slot = take_slot(shard)
        ctx.comm = noted_outer(comm) if ctx.slot is None and ctx.needs_input_grad[0] else comm
        ctx.set_materialize_grads(False)
        return tuple(views_at(full, where))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("post_backward of %s", ctx.comm.label)
        # Why now, also if the unit has several buffers: autograd runs the nodes of a forward in the
        # opposite order, so every node that read one of the buffers has run before this one.
        if ctx.post_backward is not None:
            ctx.post_backward()
        if ctx.slot is not None and ctx.slot.reducer.takes_gradients():
            ctx.slot.reducer.add(ctx.slot.number, gradient_parts(ctx.buffer, ctx.device, grads), ctx.comm)
            return None, None, None, None, None, None
        flat = flatten_gradients(ctx.buffer, ctx.device, grads)
        return ReduceScatter.apply(flat, ctx.comm), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, shard: torch.Tensor, *_: None) -> Any:
        return Unflatten.apply(AllGather.apply(shard, ctx.comm.plain), ctx.buffer)
