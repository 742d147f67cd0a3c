"""A unit's shard to its leaves, differentiably: ``AllGather`` and then ``Unflatten``, in an ordinary graph as one node.

The pair works under every transform of ``torch.func``. Outside them a node costs as much host time as a small unit's
whole forward, so there one Function does what the two do, and hands over to them where it is differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from funcshard import step
from funcshard.collectives import AllGather, ReduceScatter, give_back
from funcshard.flat import Places, Unflatten, flattened, raveled, views_at
from funcshard.plan import BufferPlan
from funcshard.transfer import Link, UnderWay, start_gather

__all__ = ["gather_leaves"]


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
    if torch._C._are_functorch_transforms_active():
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
        ctx.slot = step.slot_of(shard, link.joint)
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
