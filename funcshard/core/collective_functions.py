"""Autograd Functions of collectives on tensors that are not units.

``AllReduce`` adds along several mesh axes, and is its own adjoint. ``AxisCollective`` runs one
collective along one axis. Both can be differentiated any number of times, forwards and backwards,
and under ``vmap``.
"""

from __future__ import annotations

from typing import Any

import torch

from funcshard._utils import signed, transforms_active, unseen
from funcshard.core.axis_comm import AxisComm
from funcshard.core.basis import noted, refuse_psum
from funcshard.core.buffer_comm import BufferComm, start_reduce
from funcshard.core.grad_reducer import current_reducer

__all__ = ["AllReduce", "AxisCollective"]


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


class AxisCollective(torch.autograd.Function):
    """``AxisCollective.apply(tensor, comm)``: run a collective along an axis, over dim 0.

    The adjoint is the same Function with ``comm.adjoint``.
    """

    @staticmethod
    @signed
    @unseen
    def forward(tensor: torch.Tensor, comm: AxisComm) -> Any:
        return comm.run(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, comm = inputs
        seen = transforms_active() or (ctx.needs_input_grad[0] and current_reducer() is None)
        ctx.comm, ctx.loop = noted(comm) if seen else (comm, None)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        refuse_psum(ctx.comm, ctx.loop)
        return AxisCollective.apply(grad, ctx.comm.adjoint), None

    @staticmethod
    def jvp(ctx: Any, tensor: torch.Tensor, *_: None) -> Any:
        refuse_psum(ctx.comm, ctx.loop)
        return AxisCollective.apply(tensor, ctx.comm)

    @staticmethod
    def vmap(info: Any, in_dims: Any, tensor: torch.Tensor, comm: AxisComm) -> Any:
        out = AxisCollective.apply(tensor.movedim(in_dims[0], -1), comm)
        return out, out.ndim - 1
