"""Collectives on tensors that are not units: ``psum`` and ``pmean``, and two without autograd.

``psum`` and ``pmean`` are public and differentiable. ``all_gather`` and ``all_reduce`` are for
other parts of this library, which call them on optimizer state, norms and the like.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from funcshard._utils import signed, transforms_active, tree, unseen, untraced
from funcshard.comm import Mesh, Topology
from funcshard.core.basis import noted, refuse_psum
from funcshard.core.buffer_comm import BufferComm, start_gather, start_reduce
from funcshard.core.grad_reducer import current_reducer

__all__ = ["AllReduce", "all_gather", "all_reduce", "pmean", "psum"]

T = TypeVar("T")


class AllReduce(torch.autograd.Function):
    """``AllReduce.apply(tensor, comm)``: return the sum of the tensors of all ranks.

    It is its own adjoint because the input of each rank is a term of the output of each rank. The
    label of ``comm`` names the tensor in errors, and has to be the same on every rank.
    """

    @staticmethod
    @signed
    @unseen
    def forward(tensor: torch.Tensor, comm: BufferComm) -> Any:
        out = start_reduce(tensor, comm).finish()
        return tensor.clone() if out is tensor else out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, comm = inputs
        seen = transforms_active() or (ctx.needs_input_grad[0] and current_reducer() is None)
        ctx.comm, ctx.loop = noted(comm) if seen else (comm, None)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        refuse_psum(ctx.comm, ctx.loop)
        return AllReduce.apply(grad, ctx.comm), None

    @staticmethod
    def jvp(ctx: Any, tensor: torch.Tensor, *_: None) -> Any:
        refuse_psum(ctx.comm, ctx.loop)
        return AllReduce.apply(tensor, ctx.comm)

    @staticmethod
    def vmap(info: Any, in_dims: Any, tensor: torch.Tensor, comm: BufferComm) -> Any:
        return AllReduce.apply(tensor, comm), in_dims[0]


@untraced
def psum(x: T, mesh: Mesh) -> T:
    """Return the sum of ``x`` over all ranks of the data-parallel world.

    Every rank gets the same sum. ``psum`` is differentiable, and its own adjoint: its gradient is
    the sum of the ranks' gradients.

    Arguments:
        x: a tensor, or a tree of tensors, with the same shapes and dtypes on all ranks. The tensors
            of a tree are summed one after another.
        mesh: the ranks.

    Raises:
        TypeError: a leaf of ``x`` is not a tensor, or holds truth values, which have no sum.

    Example:
        >>> import torch, funcshard as fs
        >>> fs.simulate(lambda mesh: fs.psum(torch.tensor([1.0, 2.0]), mesh).tolist(), world_size=3)
        [[3.0, 6.0], [3.0, 6.0], [3.0, 6.0]]

    Source: ``jax.lax.psum``.
    """
    _note_collective(mesh)
    leaves, unflatten = tree.flatten(x)
    for number, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            path = tree.describe(x)[2][number]
            raise TypeError(
                f"psum and pmean take a tensor, or a tree of tensors; found {type(leaf).__name__}"
                f"{f' at {path!r}' if path else ''}: make it one with torch.tensor(..., device=mesh.device)"
            )
        if leaf.dtype == torch.bool:
            raise TypeError(
                "psum and pmean add, and a sum of bool tensors is no bool; found torch.bool: count with psum(x.int(), "
                "mesh); psum(x.int(), mesh) > 0 says whether any rank has it"
            )
    paths = [""] if leaves and leaves[0] is x else tree.paths(x)
    comms = [BufferComm(Topology(mesh, False), label=path) for path in paths]
    total: T = unflatten([AllReduce.apply(leaf, comm) for leaf, comm in zip(leaves, comms, strict=True)])
    return total


@untraced
def pmean(x: T, mesh: Mesh) -> T:
    """Return the mean of ``x`` over all ranks of the data-parallel world.

    Every rank gets the same mean. ``pmean`` is differentiable, and its own adjoint: its gradient is
    the mean of the ranks' gradients.

    Arguments:
        x: a floating-point tensor, or a tree of them, with the same shapes and dtypes on all ranks.
        mesh: the ranks.

    Raises:
        TypeError: a leaf of ``x`` is not a tensor.

    Example:
        >>> import torch, funcshard as fs
        >>> fs.simulate(
        ...     lambda mesh: fs.pmean({"loss": torch.tensor(float(mesh.rank))}, mesh), world_size=2
        ... )
        [{'loss': tensor(0.5000)}, {'loss': tensor(0.5000)}]

    Source: ``jax.lax.pmean``.
    """
    mean: T = tree.map(lambda total: total / mesh.world_size, psum(x, mesh))
    return mean


def all_gather(
    flat: torch.Tensor, mesh: Mesh, *, unit: str | None = None, buffer: str = "", sharded: bool = True, offload: bool = False
) -> torch.Tensor:
    """Return the concatenation of every rank's ``flat`` along the shard axis, without autograd.

    Arguments:
        flat: this rank's slice ``[n]``, of any dtype.
        mesh: the ranks.
        unit: name of the unit that the data belongs to, for events and errors.
        buffer: key of the unit's buffer, likewise.
        sharded: whether ``flat`` is a slice. If not, the function returns ``flat`` itself.
        offload: whether ``flat`` is on the CPU although the mesh's device is another.

    Returns:
        The whole ``[n * ranks]``; ``flat`` itself if there is nothing to gather.
    """
    _note_collective(mesh)
    comm = BufferComm(Topology(mesh, sharded), unit, buffer, offload=offload)
    with torch.no_grad():
        return start_gather(flat.detach(), comm).finish()


def all_reduce(tensor: torch.Tensor, mesh: Mesh, *, local: tuple[str, ...] = ()) -> torch.Tensor:
    """Return the sum of ``tensor`` over all mesh axes except ``local``, without autograd.

    ``tensor`` may be overwritten.
    """
    _note_collective(mesh)
    return start_reduce(tensor, BufferComm(Topology(mesh, False, local)), donated=True).finish()


def _note_collective(mesh: Mesh) -> None:
    """Let the active ``value_and_grad`` know that its loss function communicates over ``mesh``."""
    reducer = current_reducer()
    if reducer is not None:
        reducer.note_collective(mesh)
