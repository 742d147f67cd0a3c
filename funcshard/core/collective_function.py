"""The autograd Function of collectives on tensors that are not units.

It can be differentiated any number of times, forwards and backwards, and under ``vmap``.
"""

from __future__ import annotations

from typing import Any

import torch

from funcshard._utils import signed, transforms_active, unseen
from funcshard.core.axis_comm import AxisComm, SumComm
from funcshard.core.basis import noted, refuse_mixed_ranks
from funcshard.core.grad_reducer import current_reducer


class Collective(torch.autograd.Function):
    """``Collective.apply(tensor, comm)``: return the result of the collective on this rank.

    The adjoint is the same Function with ``comm.adjoint``.
    """

    @staticmethod
    @signed
    @unseen
    def forward(tensor: torch.Tensor, comm: AxisComm | SumComm) -> Any:
        return comm.run(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, comm = inputs
        seen = transforms_active() or (ctx.needs_input_grad[0] and current_reducer() is None)
        ctx.comm, ctx.loop = noted(comm) if seen else (comm, None)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        refuse_mixed_ranks(ctx.comm, ctx.loop)
        return Collective.apply(grad, ctx.comm.adjoint), None

    @staticmethod
    def jvp(ctx: Any, tensor: torch.Tensor, *_: None) -> Any:
        refuse_mixed_ranks(ctx.comm, ctx.loop)
        return Collective.apply(tensor, ctx.comm)

    @staticmethod
    def vmap(info: Any, in_dims: Any, tensor: torch.Tensor, comm: AxisComm | SumComm) -> Any:
        out = Collective.apply(tensor.movedim(in_dims[0], -1), comm)
        return out, out.ndim - 1
