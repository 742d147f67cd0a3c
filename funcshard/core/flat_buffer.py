"""Leaves and their flat buffer: views out of it, and gradients back into it.

The two Functions are exact adjoints. ``Unflatten`` gives the leaves as views of the gathered buffer, so nothing is copied
out; ``Flatten``, its backward, writes the leaves' gradients side by side into one new buffer.

All-gather, reduce-scatter and all-reduce as differentiable functions of this rank's tensors.

``AllGather`` and ``ReduceScatter`` are exact adjoints, and each one's backward applies the other, so that they can be
differentiated any number of times, forwards and backwards, under ``torch.func`` and ``vmap``. A reduction *adds* over
ranks; who wants a mean divides (``value_and_grad``, ``per_sample_grad``, ``pmean``).

A unit's shard to its leaves, differentiably: ``AllGather`` and then ``Unflatten``, in an ordinary graph as one node.

The pair works under every transform of ``torch.func``. Outside them a node costs as much host time as a small unit's
whole forward, so there one Function does what the two do, and hands over to them where it is differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from funcshard._utils import signed, transforms_active
from funcshard.core.buffer_comm import Link, UnderWay, start_gather, start_reduce, start_reduce_parts
from funcshard.core.grad_reducer import Slot, slot_of
from funcshard.plan import BufferPlan, dtype_of

__all__ = [
    "AllGather",
    "Flatten",
    "Places",
    "ReduceScatter",
    "Unflatten",
    "flattened",
    "gather_leaves",
    "give_back",
    "places",
    "ravel",
    "raveled",
    "views",
    "views_at",
]

Places = tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]


def ravel(leaves: Sequence[torch.Tensor], buffer: BufferPlan) -> torch.Tensor:
    """Copy ``leaves`` into a new flat buffer ``[padded_numel]``, zeros at its end; ``views`` is the inverse."""
    parts = [leaf.reshape(-1) for leaf in leaves]
    padding = buffer.padded_numel - buffer.numel
    return torch.cat([*parts, parts[0].new_zeros(padding)])


def views(full: torch.Tensor, buffer: BufferPlan) -> list[torch.Tensor]:
    """Return the leaves of ``buffer`` as views of ``full``, ``[padded_numel, ...]``; ``ravel`` is the inverse.

    Dimensions of ``full`` after the first, which ``vmap`` adds, come last in the leaves.
    """
    rest = full.shape[1:]
    return [full.narrow(0, leaf.offset, leaf.numel).view(leaf.shape + rest) for leaf in buffer.leaves]


def places(buffer: BufferPlan) -> Places:
    """Size, stride and offset of each leaf in the flat buffer, for ``views_at``."""
    found = []
    for leaf in buffer.leaves:
        stride = [1]
        for size in reversed(leaf.shape[1:]):
            stride.append(stride[-1] * max(size, 1))
        found.append((leaf.shape, tuple(reversed(stride[: len(leaf.shape)])), leaf.offset))
    return tuple(found)


def views_at(full: torch.Tensor, where: Places) -> list[torch.Tensor]:
    """Return what ``views`` does of a 1-D ``full``, from the ``places`` of its buffer, in half the time."""
    begin = full.storage_offset()
    return [full.as_strided(size, stride, begin + offset) for size, stride, offset in where]


class Unflatten(torch.autograd.Function):
    """``Unflatten.apply(full, buffer)``: the leaves as views of the gathered buffer; the adjoint is ``Flatten``."""

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
        return flattened(ctx.buffer, ctx.device, grads), None

    @staticmethod
    def jvp(ctx: Any, full: torch.Tensor | None, *_: None) -> Any:
        return None if full is None else Unflatten.apply(full, ctx.buffer)

    @staticmethod
    def vmap(info: Any, in_dims: Any, full: torch.Tensor, buffer: BufferPlan) -> Any:
        leaves = Unflatten.apply(full.movedim(in_dims[0], -1).contiguous(), buffer)
        return leaves, tuple(leaf.ndim - 1 for leaf in leaves)


def flattened(buffer: BufferPlan, device: torch.device, leaves: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """``Flatten`` in a backward: without a node of its own, unless that is differentiated."""
    if torch.is_grad_enabled() or transforms_active():
        return Flatten.apply(buffer, device, *leaves)
    return Flatten.forward(buffer, device, *leaves)


def raveled(buffer: BufferPlan, device: torch.device, leaves: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return the tensors, two at least, that side by side are what ``Flatten`` returns."""
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
    """``Flatten.apply(buffer, device, *leaves)``: one flat buffer ``[padded_numel]``; the adjoint is ``Unflatten``.

    A leaf that is ``None`` stands for zeros.
    """

    @staticmethod
    @signed
    def forward(buffer: BufferPlan, device: torch.device, *leaves: torch.Tensor | None) -> Any:
        return torch.cat(raveled(buffer, device, leaves))

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
    """Gather ``[n, ...]`` from every rank into ``[n * ranks, ...]``; the adjoint is ``ReduceScatter``.

    ``AllGather.apply(shard, link, released, started)``: ``released``, if given, is called when backward has come back to
    the gathered buffer, at which moment whatever the unit kept for its backward can go; ``started`` is what
    ``start_gather`` of this shard returned, if it is under way already.
    """

    @staticmethod
    @signed
    def forward(
        shard: torch.Tensor,
        link: Link,
        released: Callable[[], None] | None,
        started: UnderWay | None,
    ) -> Any:
        out = (started or start_gather(shard, link)).finish()
        return shard.view_as(shard) if out is shard else out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        shard, ctx.link, ctx.released, _ = inputs
        ctx.slot = slot_of(shard, ctx.link.joint)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.released is not None:
            ctx.released()
        if ctx.slot is not None and ctx.slot.step.reducing:
            give_back([grad.reshape(-1)], ctx.link, ctx.slot)
            return None, None, None, None
        return ReduceScatter.apply(grad, ctx.link), None, None, None

    @staticmethod
    def jvp(ctx: Any, shard: torch.Tensor, *_: None) -> Any:
        return AllGather.apply(shard, ctx.link.plain, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, shard: torch.Tensor, link: Link, released: Any, started: Any) -> Any:
        out = AllGather.apply(shard.movedim(in_dims[0], -1), link.plain, released, None)
        return out, out.ndim - 1


def give_back(parts: list[torch.Tensor], link: Link, slot: Slot) -> None:
    """Hand the gradient of a gathered buffer, ``parts`` side by side, to a step, so that nobody waits for its reduction.

    One part that is alone is donated.
    """
    start = lambda parts: start_reduce_parts(parts, link)  # noqa: E731
    slot.step.add(slot.number, parts, start, link.joint, link.unit or "", dtype=link.reduced)


class ReduceScatter(torch.autograd.Function):
    """Add up ``[n * ranks, ...]`` over ranks, each rank keeping its ``[n, ...]``; the adjoint is ``AllGather``."""

    @staticmethod
    @signed
    def forward(full: torch.Tensor, link: Link) -> Any:
        out = start_reduce(full, link).finish()
        return full.view_as(full) if out is full else out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.link = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return AllGather.apply(grad, ctx.link.plain, None, None), None

    @staticmethod
    def jvp(ctx: Any, full: torch.Tensor, *_: None) -> Any:
        return ReduceScatter.apply(full, ctx.link)

    @staticmethod
    def vmap(info: Any, in_dims: Any, full: torch.Tensor, link: Link) -> Any:
        out = ReduceScatter.apply(full.movedim(in_dims[0], -1), link)
        return out, out.ndim - 1


def gather_leaves(
    shard: torch.Tensor,
    link: Link,
    buffer: BufferPlan,
    where: Places,
    released: Callable[[], None] | None,
    started: UnderWay | None,
) -> tuple[torch.Tensor, ...]:
    """Gather ``shard`` and return the leaves of its buffer as views.

    Arguments:
        shard: this rank's shard.
        link: what it is gathered over.
        buffer: its flat buffer.
        where: the buffer's ``places``.
        released: see ``AllGather``.
        started: see ``AllGather``.
    """
    if transforms_active():
        return Unflatten.apply(AllGather.apply(shard, link, released, started), buffer)
    return _Leaves.apply(shard, link, buffer, where, released, started)


class _Leaves(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        shard: torch.Tensor,
        link: Link,
        buffer: BufferPlan,
        where: Places,
        released: Callable[[], None] | None,
        started: UnderWay | None,
    ) -> Any:
        full = (started or start_gather(shard, link)).finish()
        ctx.link, ctx.buffer, ctx.released, ctx.device = link, buffer, released, full.device
        ctx.slot = slot_of(shard, link.joint)
        ctx.set_materialize_grads(False)
        return tuple(views_at(full, where))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if ctx.released is not None:
            ctx.released()
        if ctx.slot is not None and ctx.slot.step.reducing:
            give_back(raveled(ctx.buffer, ctx.device, grads), ctx.link, ctx.slot)
            return None, None, None, None, None, None
        return ReduceScatter.apply(flattened(ctx.buffer, ctx.device, grads), ctx.link), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, shard: torch.Tensor, *_: None) -> Any:
        return Unflatten.apply(AllGather.apply(shard, ctx.link.plain, None, None), ctx.buffer)
