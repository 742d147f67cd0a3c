"""Sums of single samples' clipped gradients on one rank, before anything is reduced.

Gradients are taken with respect to gathered leaves, with ``vmap``. They stay apart by leaf: to put
each sample's into a flat buffer would copy all of them once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree
from funcshard._utils.torch_private import version
from funcshard.comm import Mesh, all_gather_texts
from funcshard.core import (
    BufferComm,
    GradReducer,
    Shards,
    activate,
    all_reduce_flat,
    decoded_views,
    modified_leaf,
    start_gather,
    unshard,
)
from funcshard.plan import AXES, BufferPlan, UnitPlan, position_of
from funcshard.train.clipping import norm_of_rows

OnSampleGrads = Callable[[str, dict[str, torch.Tensor]], None]
Grads = list[torch.Tensor]  # ``[samples, *shape]`` of each leaf of a buffer


class UnitBuffer(NamedTuple):
    """One flat buffer of a unit, and how it is gathered and reduced."""

    unit: UnitPlan
    buffer: BufferPlan
    comm: BufferComm


def buffers_of(unit: UnitPlan, mesh: Mesh) -> list[UnitBuffer]:
    """Return the flat buffers of a unit."""
    comms = unshard(lambda leaves: leaves, unit, mesh).comms
    return [UnitBuffer(unit, *pair) for pair in zip(unit.buffers, comms, strict=True)]


class GatheredBuffer(NamedTuple):
    """A buffer that was gathered for one call.

    Attributes:
        source: the buffer.
        shard: its shard in the tree that the loss function gets.
        whole: the gathered buffer.
        leaves: the leaves in it.
        writes: its version when it came.
    """

    source: UnitBuffer
    shard: torch.Tensor
    whole: torch.Tensor
    leaves: list[torch.Tensor]
    writes: int


def sum_of_samples(
    call: Callable[[Any, Any], torch.Tensor],
    shards: Shards,
    batch: Any,
    buffers: Sequence[UnitBuffer],
    mesh: Mesh,
    *,
    max_norm: float | None,
    chunk_size: int | None,
    on_grads: OnSampleGrads | None,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return losses and norms of this rank's samples, and the sums of their clipped gradients.

    The sums are those of each trainable buffer, ``[padded_numel]``. Further arguments are those of
    ``per_sample_grad``.

    Arguments:
        call: ``call(shards, sample)`` returns the loss of one sample.
        shards: this rank's shards.
        batch: a pytree of tensors whose dim 0 counts samples.
        buffers: all buffers of the plan.
        mesh: the ranks.
        max_norm: see there.
        chunk_size: see there.
        on_grads: see there.
    """
    samples, unflatten_sample = tree.flatten(batch)
    count = sample_count(samples)
    check_samples(count, chunk_size, mesh)
    gathered = [gather_buffer(source, shards) for source in buffers]
    traced_shards = {name: dict(unit_shards) for name, unit_shards in shards.items()}
    for entry in gathered:
        traced_shards[entry.source.unit.name][entry.source.buffer.key] = entry.shard
    trained = [entry for entry in gathered if entry.source.buffer.trainable]
    loss_depends = not trained  # whether a gradient leaves the loss

    def loss_of(
        trained_leaves: list[list[torch.Tensor]], sample: list[torch.Tensor]
    ) -> torch.Tensor:
        nonlocal loss_depends
        remaining_leaves = iter(trained_leaves)
        leaves = [
            next(remaining_leaves) if entry.source.buffer.trainable else entry.leaves
            for entry in gathered
        ]
        with activate(GradReducer([entry.shard for entry in gathered], gathered=leaves)):
            loss = call(traced_shards, unflatten_sample(sample))
        # Inside grad_and_value a loss requires a gradient if one reaches the leaves.
        loss_depends = loss_depends or getattr(loss, "requires_grad", False)
        return loss

    # Note: each sample draws its own dropout.
    of_samples = torch.vmap(torch.func.grad_and_value(loss_of), (None, 0), randomness="different")
    # The sums have the dtype of the shards, also in a unit that computes in a narrower dtype.
    sums = [torch.zeros_like(entry.whole, dtype=entry.shard.dtype) for entry in trained]
    losses: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    for begin in range(0, count, chunk_size or max(count, 1)):
        sample_chunk = [sample[begin : begin + (chunk_size or count)] for sample in samples]
        with torch.enable_grad():
            grads, chunk_losses = of_samples([entry.leaves for entry in trained], sample_chunk)
        check_unwritten(gathered)
        check_direct("per_sample_grad", trained, chunk_losses)
        if not loss_depends:
            raise ValueError(CONSTANT)
        grads = [
            _over_model_axes(buffer_grads, entry.source, mesh)
            for entry, buffer_grads in zip(trained, grads, strict=True)
        ]
        if on_grads is not None:
            _call_hook(trained, grads, on_grads)
        losses.append(chunk_losses.detach())
        norms.append(_norms(grads, trained, mesh))
        _add(sums, grads, trained, norms[-1], max_norm)
        del grads  # so that the gradients of only one chunk exist at a time
    # A rank may have no samples.
    nothing = [torch.zeros(0, device=mesh.device, dtype=torch.float32)]
    return torch.cat(losses or nothing), torch.cat(norms or nothing), sums


CONSTANT = (
    "loss_fn must return a loss that depends on a trainable shard of its argument; found a loss "
    "that no gradient leaves, as from no_grad, detached tensors, frozen leaves only, or shards "
    "that loss_fn did not get as its argument: compute it from the shards that loss_fn is called "
    "with"
)


def check_unwritten(gathered: Sequence[GatheredBuffer]) -> None:
    """Raise if a loss wrote to a gathered leaf, which changes it for all samples."""
    for entry in gathered:
        # No gradient would tell.
        if version(entry.whole) != entry.writes:
            raise modified_leaf(entry.source.unit, entry.source.buffer)


def gather_buffer(source: UnitBuffer, shards: Shards) -> GatheredBuffer:
    """Gather a buffer for one call."""
    shard = shards[source.unit.name][source.buffer.key].detach()
    whole = start_gather(shard, source.comm, read_only=True).finish()
    # No gradient reaches a shard that is only gathered, because its unit gets gathered leaves.
    # A loss that requires a gradient outside of torch.func.grad uses it in another way.
    shard = shard.detach().requires_grad_(source.buffer.trainable)
    return GatheredBuffer(
        source=source,
        shard=shard,
        whole=whole,
        leaves=decoded_views(whole, source.buffer),
        writes=version(whole),
    )


def model_axes(mesh: Mesh) -> list[str]:
    """Return the axes, of more than one rank, along which ranks work on the same samples."""
    return [axis for axis, _ in mesh.axes if axis not in AXES]


def _over_model_axes(grads: Grads, source: UnitBuffer, mesh: Mesh) -> Grads:
    """Return the gradients of samples, contiguous, from those of each rank's loss."""
    grads = [grad.detach().contiguous() for grad in grads]
    all_axes = model_axes(mesh)
    if not all_axes:
        return grads
    shared_axes = [axis for axis in all_axes if axis not in source.buffer.local]
    if shared_axes:
        flat_grads = torch.cat([grad.reshape(len(grad), -1) for grad in grads], 1)
        other_axes = tuple(axis for axis in mesh.groups if axis not in shared_axes)
        flat_grads = all_reduce_flat(flat_grads, mesh, local=other_axes)
        summed_parts = flat_grads.split([leaf.numel for leaf in source.buffer.leaves], 1)
        grads = [part.reshape(grad.shape) for part, grad in zip(summed_parts, grads, strict=True)]
    num_ranks = math.prod(mesh.groups[axis].size for axis in all_axes)
    return [grad / num_ranks for grad in grads]


def _call_hook(
    trained: Sequence[GatheredBuffer], grads: Sequence[Grads], on_grads: OnSampleGrads
) -> None:
    by_unit: dict[str, dict[str, torch.Tensor]] = {}
    for entry, buffer_grads in zip(trained, grads, strict=True):
        by_path = by_unit.setdefault(entry.source.unit.name, {})
        for leaf, grad in zip(entry.source.buffer.leaves, buffer_grads, strict=True):
            by_path[leaf.path] = grad
    with torch.no_grad():
        for unit_name, by_path in by_unit.items():
            on_grads(unit_name, by_path)


def _norms(grads: Sequence[Grads], trained: Sequence[GatheredBuffer], mesh: Mesh) -> torch.Tensor:
    """Return the norm of each sample's gradient over all buffers, in float32 or wider."""
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for entry, buffer_grads in zip(trained, grads, strict=True):
        local_axes = tuple(axis for axis in model_axes(mesh) if axis in entry.source.buffer.local)
        by_axes.setdefault(local_axes, []).append(_norm(buffer_grads))
    axes_norms = []
    for local_axes, buffer_norms in by_axes.items():
        # Buffers along the same axes share one all-reduce.
        norm = torch.linalg.vector_norm(torch.stack(buffer_norms), dim=0)
        if local_axes:  # the rest of these buffers lies on the ranks along these axes
            other_axes = tuple(axis for axis in mesh.groups if axis not in local_axes)
            norm = all_reduce_flat(norm.square(), mesh, local=other_axes).sqrt()
        axes_norms.append(norm)
    return torch.linalg.vector_norm(torch.stack(axes_norms), dim=0)


def _norm(grads: Grads) -> torch.Tensor:
    """Return the norm of each sample's gradient of one buffer."""
    wide_dtype = torch.promote_types(grads[0].dtype, torch.float32)
    grad_rows = [grad.reshape(len(grad), -1) for grad in grads if grad.numel()]
    if not grad_rows:
        return grads[0].new_zeros(len(grads[0]), dtype=wide_dtype.to_real())
    leaf_norms = [norm_of_rows(row, 2.0, wide_dtype) for row in grad_rows]
    return torch.linalg.vector_norm(torch.stack(leaf_norms), dim=0)


def _add(
    sums: Sequence[torch.Tensor],
    grads: Sequence[Grads],
    trained: Sequence[GatheredBuffer],
    norms: torch.Tensor,
    max_norm: float | None,
) -> None:
    """Add one chunk's gradients to ``sums``, each sample's clipped to ``max_norm``."""
    clip_scale = torch.ones_like(norms)
    if max_norm is not None:
        clip_scale = (max_norm / norms).clamp(max=1.0)
    for buffer_sum, buffer_grads, entry in zip(sums, grads, trained, strict=True):
        sample_weights = clip_scale.to(buffer_sum)
        for leaf, grad in zip(entry.source.buffer.leaves, buffer_grads, strict=True):
            if leaf.numel:
                grad_rows = grad.reshape(len(grad), -1).to(buffer_sum.dtype)
                # Why a product: it clips and adds in one pass, without a copy of the clipped
                # gradients.
                buffer_sum.narrow(0, leaf.offset, leaf.numel).addmv_(grad_rows.t(), sample_weights)


def sample_count(samples: list[Any]) -> int:
    """Return the number of samples, the one size of dim 0 of the batch's tensors."""
    sizes: set[int | str] = set()
    for sample in samples:
        is_tensor = isinstance(sample, torch.Tensor) and sample.ndim > 0
        sizes.add(sample.shape[0] if is_tensor else type(sample).__name__)
    size = next(iter(sizes), None)
    if len(sizes) != 1 or not isinstance(size, int):
        raise ValueError(
            "the batch must be a pytree of tensors with one size of dim 0, which counts samples; "
            f"found {sorted(map(str, sizes)) or 'no leaves'}: pass what all samples share before "
            "the batch, or by keyword"
        )
    return size


def check_samples(count: int, chunk_size: int | None, mesh: Mesh) -> None:
    """Raise on every rank unless ranks along model axes pass equally many samples."""
    axes = model_axes(mesh)
    if not axes:
        return
    count_text = f"{count} in chunks of {chunk_size}" if chunk_size else str(count)
    first_ranks: dict[tuple[int, ...], int] = {}
    counts_by_rank = all_gather_texts(mesh, count_text, "samples")
    for rank, rank_count in enumerate(counts_by_rank):
        position = position_of(rank, mesh.shape)
        peer = first_ranks.setdefault(tuple(position[axis] for axis in AXES), rank)
        if rank_count != counts_by_rank[peer]:
            raise ValueError(
                f"ranks along {' and '.join(map(repr, axes))} must pass the same samples, whose "
                f"losses they compute together; found {counts_by_rank[peer]} on rank {peer} and "
                f"{rank_count} on rank {rank}: split the batch along the data axes only"
            )


def check_direct(caller: str, trained: Sequence[GatheredBuffer], losses: torch.Tensor) -> None:
    """Raise ``ValueError`` if a gradient reaches a shard other than by gathering its unit."""
    if not losses.requires_grad:
        return
    shards = [entry.shard for entry in trained]
    grads = torch.autograd.grad(
        losses, shards, torch.ones_like(losses), allow_unused=True, retain_graph=True
    )
    for entry, grad in zip(trained, grads, strict=True):
        if grad is not None and grad.any():
            raise ValueError(
                f"{caller} differentiates gathered units only; a gradient reached the shard "
                f"{entry.source.buffer.key!r} of unit {entry.source.unit.title!r} by another way, "
                "such as a penalty on the shard itself or remat around the unit: leave these out "
                "of loss_fn, and add a penalty's gradient to the result"
            )
