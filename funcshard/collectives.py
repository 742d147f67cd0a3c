"""All-gather, reduce-scatter and all-reduce as differentiable functions of this rank's tensors.

``AllGather`` and ``ReduceScatter`` are exact adjoints, and each one's backward applies the other, so that they can be
differentiated any number of times, forwards and backwards, under ``torch.func`` and ``vmap``. A reduction *adds* over
ranks; who wants a mean divides (``value_and_grad``, ``per_sample_grad``, ``pmean``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from funcshard import step, tree
from funcshard.function import signed
from funcshard.mesh import Mesh
from funcshard.transfer import Link, UnderWay, start_gather, start_reduce, start_reduce_parts
from funcshard.untraced import untraced

__all__ = ["AllGather", "AllReduce", "ReduceScatter", "give_back", "pmean", "psum"]

T = TypeVar("T")


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
        ctx.slot = step.slot_of(shard, ctx.link.joint)

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


def give_back(parts: list[torch.Tensor], link: Link, slot: step.Slot) -> None:
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


class AllReduce(torch.autograd.Function):
    """Add up every rank's tensor; its own adjoint, because each rank's input reaches each rank's output."""

    @staticmethod
    @signed
    def forward(tensor: torch.Tensor, mesh: Mesh) -> Any:
        out = start_reduce(tensor, Link(mesh, None, "", False)).finish()
        return tensor.clone() if out is tensor else out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.mesh = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return AllReduce.apply(grad, ctx.mesh), None

    @staticmethod
    def jvp(ctx: Any, tensor: torch.Tensor, *_: None) -> Any:
        return AllReduce.apply(tensor, ctx.mesh)

    @staticmethod
    def vmap(info: Any, in_dims: Any, tensor: torch.Tensor, mesh: Mesh) -> Any:
        return AllReduce.apply(tensor, mesh), in_dims[0]


@untraced
def psum(x: T, mesh: Mesh) -> T:
    """Return the sum of ``x`` over every rank of the data-parallel world; differentiable, its own adjoint.

    Arguments:
        x: a tensor of one shape and dtype on every rank, or a tree of such, which are added up one after another.
        mesh: the ranks.

    Raises:
        TypeError: a leaf is no tensor.

    Example:
        >>> import torch, funcshard as fs
        >>> fs.simulate(lambda mesh: fs.psum(torch.tensor([1.0, 2.0]), mesh).tolist(), world_size=3)
        [[3.0, 6.0], [3.0, 6.0], [3.0, 6.0]]

    Source: ``jax.lax.psum``.
    """
    leaves, put_back = tree.flatten(x)
    for number, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            path = tree.describe(x)[2][number]
            raise TypeError(
                f"psum and pmean take a tensor, or a tree of tensors; found {type(leaf).__name__}"
                f"{f' at {path!r}' if path else ''}: make it one with torch.tensor(..., device=mesh.device)"
            )
    total: T = put_back([AllReduce.apply(leaf, mesh) for leaf in leaves])
    return total


@untraced
def pmean(x: T, mesh: Mesh) -> T:
    """Return the mean of ``x`` over every rank of the data-parallel world; differentiable, its own adjoint.

    Arguments:
        x: a floating-point tensor of one shape and dtype on every rank, or a tree of such.
        mesh: the ranks.

    Raises:
        TypeError: a leaf is no tensor.

    Example:
        >>> import torch, funcshard as fs
        >>> fs.simulate(lambda mesh: fs.pmean({"loss": torch.tensor(float(mesh.rank))}, mesh), world_size=2)
        [{'loss': tensor(0.5000)}, {'loss': tensor(0.5000)}]

    Source: ``jax.lax.pmean``.
    """
    mean: T = tree.map(lambda total: total / mesh.world_size, psum(x, mesh))
    return mean
