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

from funcshard._utils import tree
from funcshard._utils.options import check_count
from funcshard._utils.torch_private import signed, untraced
from funcshard.comm import Mesh
from funcshard.core import (
    GradReducer,
    Shards,
    activate,
    all_reduce_flat,
    check_callable,
    check_mesh,
    check_shards,
    psum,
)
from funcshard.plan import Plan
from funcshard.train.clipping import norm_of_rows
from funcshard.train.sample_sums import (
    CONSTANT,
    GatheredBuffer,
    UnitBuffer,
    buffers_of,
    check_direct,
    check_samples,
    check_unwritten,
    gather_buffer,
    model_axes,
    sample_count,
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
    sources = [entry for unit in plan.unit_list for entry in buffers_of(unit, mesh)]

    @untraced
    def run(shards: Shards, /, *rest: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not rest:
            raise TypeError(
                "the function takes (shards, *rest, batch), the batch as its last positional "
                "argument"
            )
        *arguments, batch = rest
        check_shards(plan, shards, mesh)
        samples, unflatten_sample = tree.flatten(batch)
        count = sample_count(samples)
        check_samples(count, chunk_size, mesh)
        gathered = [gather_buffer(source, shards) for source in sources]
        trained = [entry for entry in gathered if entry.source.buffer.trainable]
        traced_shards = {name: dict(unit_shards) for name, unit_shards in shards.items()}
        for entry in gathered:
            traced_shards[entry.source.unit.name][entry.source.buffer.key] = entry.shard
        loss_depends = not trained

        def loss_of(squares: dict[Any, torch.Tensor], sample: list[torch.Tensor]) -> torch.Tensor:
            nonlocal loss_depends
            leaves = [
                _SeenLeaves(entry, squares, mesh) if entry.source.buffer.trainable else entry.leaves
                for entry in gathered
            ]
            with activate(GradReducer([entry.shard for entry in gathered], gathered=leaves)):
                loss = loss_fn(traced_shards, *arguments, unflatten_sample(sample), **kwargs)
            loss_depends = loss_depends or getattr(loss, "requires_grad", False)
            return loss.reshape(())

        dtype = functools.reduce(
            torch.promote_types, [entry.shard.dtype.to_real() for entry in trained], torch.float32
        )
        axes_sets = {(), *(_own_axes(entry.source, mesh) for entry in trained)}
        zeros = {
            axes: torch.zeros((), dtype=dtype, device=mesh.device) for axes in sorted(axes_sets)
        }

        def norms_of(sample: list[torch.Tensor]) -> Any:
            loss, pull = _vjp(lambda squares: loss_of(squares, sample), zeros)
            # Why not torch.func.grad: it would record backward, and keep what that computes.
            return pull(torch.ones_like(loss), retain_graph=False, create_graph=False)[0], loss

        of_samples = torch.vmap(norms_of, randomness="different")
        losses, norms = [], []
        for begin in range(0, count, chunk_size or max(count, 1)):
            sample_chunk = [sample[begin : begin + (chunk_size or count)] for sample in samples]
            with torch.enable_grad():
                squares, chunk_losses = of_samples(sample_chunk)
            check_unwritten(gathered)
            check_direct("per_sample_norms", trained, chunk_losses)
            if not loss_depends:
                raise ValueError(CONSTANT)
            losses.append(chunk_losses.detach())
            sums = [_over_own_axes(part, axes, mesh) for axes, part in squares.items()]
            norms.append(torch.stack(sums).sum(0).sqrt())
        # A rank may have no samples.
        nothing = [torch.zeros(0, device=mesh.device, dtype=torch.float32)]
        return torch.cat(losses or nothing), torch.cat(norms or nothing)

    return run


def _own_axes(source: UnitBuffer, mesh: Mesh) -> tuple[str, ...]:
    """Return the model axes along which ranks have other parts of a sample's gradient."""
    return tuple(axis for axis in model_axes(mesh) if axis in source.buffer.local)


def _over_own_axes(squares: torch.Tensor, axes: tuple[str, ...], mesh: Mesh) -> torch.Tensor:
    """Return the sums of squares of all parts, which lie on the ranks along ``axes``."""
    if not axes:
        return squares.detach()
    other_axes = tuple(axis for axis in mesh.groups if axis not in axes)
    return all_reduce_flat(squares.detach().clone(), mesh, local=other_axes)


def _over_model_axes(grad: torch.Tensor, *, source: UnitBuffer, mesh: Mesh) -> torch.Tensor:
    """Return the gradient of a sample's loss by a leaf, from that of this rank's loss."""
    axes = model_axes(mesh)
    shared_axes = tuple(axis for axis in axes if axis not in source.buffer.local)
    if shared_axes:
        grad = psum(grad, mesh, axis=shared_axes)
    for axis in axes:
        grad = grad / mesh.groups[axis].size
    return grad


class _SeenLeaves(Sequence[torch.Tensor]):
    """The leaves of a buffer, each through ``_Norm``, from their first use on.

    Why not before: backward runs nodes in the opposite order of forward. A node that comes before
    all units would run after all of them, and their gradients would wait for it.
    """

    def __init__(self, entry: GatheredBuffer, squares: dict[Any, torch.Tensor], mesh: Mesh) -> None:
        self.entry, self.mesh = entry, mesh
        self.squares = squares[_own_axes(entry.source, mesh)]

    @functools.cached_property
    def leaves(self) -> list[torch.Tensor]:
        """The leaves."""
        total = functools.partial(_over_model_axes, source=self.entry.source, mesh=self.mesh)
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
