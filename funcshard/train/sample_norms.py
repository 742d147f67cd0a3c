"""``per_sample_norms``: the norms of single samples' gradients, which exist one leaf at a time.

The loss of a sample gets its leaves through ``_Norm``, an identity whose backward sees the whole
gradient of a leaf: it adds up the squares, and drops the gradient. ``_SeenLeaves`` makes these
where a unit is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from funcshard._utils.options import check_count
from funcshard._utils.torch_private import signed, untraced
from funcshard.comm import Mesh
from funcshard.core import BufferComm, Shards, check_callable, check_mesh, check_shards, psum
from funcshard.plan import Plan
from funcshard.train.clipping import norm_of_rows
from funcshard.train.per_sample import (
    GatheredBuffer,
    SampleWalk,
    local_model_axes,
    model_axes,
    over_axes,
)

_vjp: Any = torch.func.vjp  # torch's annotations do not know the options of the pullback


def per_sample_norms(
    loss_fn: Callable[..., torch.Tensor], plan: Plan, mesh: Mesh, *, chunk_size: int | None = None
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that computes the norm of every sample's gradient, without the gradients.

    The norms are those of ``per_sample_grad``. Instead of the gradients of a chunk's samples by all
    leaves, only those by one leaf exist at a time: backward adds up their squares and drops them. A
    call gathers each unit once and reduces nothing. Two passes clip single samples so: the norms,
    and then ``value_and_grad`` of the loss in which each sample has its factor.

    Arguments:
        loss_fn: ``loss_fn(shards, *rest, sample)`` returns the loss of one sample, a scalar; see
            ``per_sample_grad``.
        plan: the plan of the shards.
        mesh: the ranks.
        chunk_size: the number of samples that run at one time. By default it is the number of this
            rank's samples.

    Returns:
        ``f(shards, *rest, batch, **kwargs)``, which returns ``(losses, norms)`` of this rank's
        samples, of shape ``[samples]``; the norms are in float32 or wider. ``batch`` is a pytree of
        tensors whose dim 0 counts samples.

    Raises:
        ValueError: see ``per_sample_grad``.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.zeros(2)}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves, x: leaves["w"] @ x, plan.units[""], mesh)
        ...     evaluate = fs.per_sample_norms(lambda shards, x: f(shards[""], x), plan, mesh)
        ...     batch = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        ...     return evaluate(fs.shard(params, plan, mesh), batch)[1].tolist()
        >>> fs.simulate(main, world_size=2)
        [[5.0, 1.0], [5.0, 1.0]]

    Source: Li et al., "Large language models can be strong differentially private learners", 2022,
    whose "ghost clipping" has formulas for the norms of some layers.
    """
    check_callable("per_sample_norms", loss_fn)
    if chunk_size is not None:
        check_count("chunk_size", chunk_size, of="samples", none="for all")
    check_mesh(plan, mesh)

    @untraced
    def run(shards: Shards, /, *rest: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        check_shards(plan, shards, mesh)
        walk = SampleWalk("per_sample_norms", loss_fn, plan, mesh, shards, rest, kwargs, chunk_size)
        dtype = functools.reduce(
            torch.promote_types,
            [entry.shard.dtype.to_real() for entry in walk.trained],
            torch.float32,
        )
        axes_sets = {(), *(local_model_axes(entry.comm.plan, mesh) for entry in walk.trained)}
        zeros = {
            axes: torch.zeros((), dtype=dtype, device=mesh.device) for axes in sorted(axes_sets)
        }

        def squares_of(sample: list[torch.Tensor]) -> Any:
            def loss_of(squares: dict[Any, torch.Tensor]) -> torch.Tensor:
                leaves = [_SeenLeaves(entry, squares, mesh) for entry in walk.trained]
                return walk.loss(leaves, sample).reshape(())

            loss, pull = _vjp(loss_of, zeros)
            # Why not torch.func.grad: it would record backward, and keep what that computes.
            return pull(torch.ones_like(loss), retain_graph=False, create_graph=False)[0], loss

        def norms_of(squares: dict[Any, torch.Tensor]) -> torch.Tensor:
            sums = [over_axes(part.detach().clone(), axes, mesh) for axes, part in squares.items()]
            return torch.stack(sums).sum(0).sqrt()

        return walk.chunks(squares_of, norms_of)

    return run


def _over_model_axes(grad: torch.Tensor, *, comm: BufferComm) -> torch.Tensor:
    """Return the gradient of a sample's loss by a leaf, from that of this rank's loss."""
    axes = model_axes(comm.mesh)
    shared_axes = tuple(axis for axis in axes if axis not in comm.plan.local)
    if shared_axes:
        grad = psum(grad, comm.mesh, axis=shared_axes)
    for axis in axes:
        grad = grad / comm.mesh.groups[axis].size
    return grad


class _SeenLeaves(Sequence[torch.Tensor]):
    """The leaves of a buffer, each through ``_Norm``, from their first use on.

    Why not before: backward runs nodes in the opposite order of forward. A node that comes before
    all units would run after all of them, and their gradients would wait for it.
    """

    def __init__(self, entry: GatheredBuffer, squares: dict[Any, torch.Tensor], mesh: Mesh) -> None:
        self.entry = entry
        self.squares = squares[local_model_axes(entry.comm.plan, mesh)]

    @functools.cached_property
    def leaves(self) -> list[torch.Tensor]:
        """The leaves."""
        total = functools.partial(_over_model_axes, comm=self.entry.comm)
        return [_Norm.apply(leaf, self.squares, total) for leaf in self.entry.leaves]

    def __getitem__(self, index: Any) -> Any:
        return self.leaves[index]

    def __len__(self) -> int:
        return len(self.entry.leaves)


class _Norm(torch.autograd.Function):
    """``_Norm.apply(leaf, squares, total)``: the leaf.

    Backward adds the squares of the leaf's gradient, after ``total``, to the gradient of
    ``squares``, and passes none on to the leaf.
    """

    @staticmethod
    @signed
    def forward(leaf: torch.Tensor, squares: torch.Tensor, total: Any) -> Any:
        return leaf.view_as(leaf)  # a Function must not return its input itself

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, squares, ctx.total = inputs
        ctx.dtype = squares.dtype

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = ctx.total(grad)
        if not grad.numel():
            return None, None, None
        wide_dtype = torch.promote_types(grad.dtype, torch.float32)
        norm = norm_of_rows(grad.flatten(), 2.0, wide_dtype)
        return None, norm.to(ctx.dtype).square(), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, leaf: torch.Tensor, squares: Any, total: Any) -> Any:
        return _Norm.apply(leaf, squares, total), in_dims[0]  # a map of the caller over models
