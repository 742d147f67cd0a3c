"""Sums of single samples' clipped gradients on one rank, before anything is reduced.

Units are gathered once. Gradients are taken with respect to their gathered leaves, with ``vmap``.
They stay apart by leaf, because to put each sample's gradients into a flat buffer would copy all of
them once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils import signed, tree, version
from funcshard.comm import Mesh, all_gather_texts
from funcshard.core import (
    BufferComm,
    GradReducer,
    Shards,
    activate,
    all_reduce_flat,
    modified_leaf,
    start_gather,
    unshard,
    views,
)
from funcshard.plan import AXES, BufferPlan, UnitPlan, position_of
from funcshard.train.clipping import norm_of_rows

OnSampleGrads = Callable[[str, dict[str, torch.Tensor]], None]
Grads = list[torch.Tensor]  # ``[samples, *shape]`` of each leaf of a buffer


@dataclass(frozen=True, slots=True)
class UnitBuffer:
    """One flat buffer of a unit, and how it is gathered and reduced."""

    unit: UnitPlan
    buffer: BufferPlan
    comm: BufferComm

    @classmethod
    def all_of(cls, unit: UnitPlan, mesh: Mesh) -> list[UnitBuffer]:
        """Return the flat buffers of a unit, frozen ones included."""
        comms = unshard(lambda leaves: leaves, unit, mesh).comms
        return [cls(unit, buffer, comm) for buffer, comm in zip(unit.buffers, comms, strict=True)]

    @property
    def name(self) -> tuple[str, str]:
        """The names of the unit and of the buffer in it, which find the shard in a tree."""
        return self.unit.name, self.buffer.key

    def shard_in(self, shards: Shards) -> torch.Tensor:
        """Return the buffer's shard, detached."""
        return shards[self.unit.name][self.buffer.key].detach()


@dataclass(frozen=True, slots=True)
class SampleSums:
    """The losses, norms and sums of one rank's samples.

    Attributes:
        losses: the loss of each sample.
        norms: the norm of each sample's gradient.
        sums: the sum of the clipped gradients of each trainable buffer, ``[padded_numel]``.
    """

    losses: torch.Tensor
    norms: torch.Tensor
    sums: list[torch.Tensor]


class _Watch(torch.autograd.Function):
    """``_Watch.apply(shard, probe)``: the shard; the probe's gradient is one if the shard has any.

    No gradient reaches a shard that is only gathered, because its unit gets gathered leaves. So
    backward runs for the other shards alone.
    """

    @staticmethod
    @signed
    def forward(shard: torch.Tensor, probe: torch.Tensor) -> torch.Tensor:
        return shard.view_as(shard)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, grad.any().to(torch.float32)

    @staticmethod
    def vmap(info: Any, in_dims: Any, shard: torch.Tensor, probe: torch.Tensor) -> Any:
        raise AssertionError("neither shards nor probes have a dim of samples")


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
) -> SampleSums:
    """Return losses and norms of this rank's samples, and the sums of their clipped gradients.

    Arguments:
        call: ``call(shards, sample)`` returns the loss of one sample.
        shards: this rank's shards.
        batch: a pytree of tensors whose dim 0 counts samples.
        buffers: all buffers of the plan.
        mesh: the ranks.
        max_norm: see ``per_sample_grad``.
        chunk_size: see ``per_sample_grad``.
        on_grads: see ``per_sample_grad``.
    """
    samples, unflatten_sample = tree.flatten(batch)
    count = _count(samples)
    _check_samples(count, chunk_size, mesh)
    trained = [unit_buffer for unit_buffer in buffers if unit_buffer.buffer.trainable]
    whole_buffers = {
        unit_buffer.name: start_gather(
            unit_buffer.shard_in(shards), unit_buffer.comm, read_only=True
        ).finish()
        for unit_buffer in buffers
    }
    gathered = {
        unit_buffer.name: views(whole_buffers[unit_buffer.name], unit_buffer.buffer)
        for unit_buffer in buffers
    }
    writes = {name: version(full) for name, full in whole_buffers.items()}

    def loss_of(
        leaves: list[list[torch.Tensor]], probes: list[torch.Tensor], sample: list[torch.Tensor]
    ) -> torch.Tensor:
        given_leaves = gathered | {
            unit_buffer.name: buffer_leaves
            for unit_buffer, buffer_leaves in zip(trained, leaves, strict=True)
        }
        traced = {name: dict(shard) for name, shard in shards.items()}
        for unit_buffer, probe in zip(trained, probes, strict=True):
            traced[unit_buffer.unit.name][unit_buffer.buffer.key] = _Watch.apply(
                unit_buffer.shard_in(shards), probe
            )
        with activate(
            GradReducer(
                [traced[unit][key] for unit, key in given_leaves], gathered=[*given_leaves.values()]
            )
        ):
            loss = call(traced, unflatten_sample(sample))
        if leaves and isinstance(loss, torch.Tensor) and not loss.requires_grad:
            raise ValueError(
                "loss_fn must return a loss that depends on a trainable shard of its argument; "
                "found a loss that no gradient leaves, as from no_grad, detached tensors, frozen "
                "leaves only, or shards that loss_fn did not get as its argument: compute it from "
                "the shards that loss_fn is called with"
            )
        return loss

    of_samples = torch.vmap(
        torch.func.grad_and_value(loss_of, argnums=(0, 1)), (None, None, 0), randomness="different"
    )
    leaves = [gathered[unit_buffer.name] for unit_buffer in trained]
    probes = [
        torch.zeros((), device=unit_buffer.shard_in(shards).device, dtype=torch.float32)
        for unit_buffer in trained
    ]
    # The sums have the dtype of the shards, also in a unit that computes in a narrower dtype.
    make = torch.empty_like if count else torch.zeros_like  # the first chunk fills the sums
    sums = [
        make(whole_buffers[unit_buffer.name], dtype=unit_buffer.shard_in(shards).dtype)
        for unit_buffer in trained
    ]
    losses: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    for begin, end in _chunks(count, chunk_size):
        (grads, direct), values = of_samples(
            leaves, probes, [sample[begin:end] for sample in samples]
        )
        _check_unchanged(buffers, whole_buffers, writes)
        _check_direct(trained, direct)
        grads = [
            _own(_over_model_axes(buffer_grads, unit_buffer, mesh))
            for unit_buffer, buffer_grads in zip(trained, grads, strict=True)
        ]
        if on_grads is not None:
            _show(trained, grads, on_grads)
        losses.append(values.detach())
        norms.append(_norms(grads, trained, mesh))
        _add(sums, grads, trained, norms[-1], max_norm, first=begin == 0)
        del grads, direct  # so that the gradients of only one chunk exist at a time
    nothing = [torch.zeros(0, device=sums[0].device if sums else None, dtype=torch.float32)]
    return SampleSums(torch.cat(losses or nothing), torch.cat(norms or nothing), sums)


def model_axes(mesh: Mesh) -> list[str]:
    """Return the axes, of more than one rank, along which ranks work on the same samples."""
    return [axis for axis, _ in mesh.axes if axis not in AXES]


def _own(grads: Grads) -> Grads:
    """Return gradients that on_grads may write to, and that reshape without a copy."""
    return [grad.contiguous() for grad in grads]


def _over_model_axes(grads: Grads, each: UnitBuffer, mesh: Mesh) -> Grads:
    """Return the gradients of samples from those of each rank's loss; may overwrite these."""
    axes = model_axes(mesh)
    if not axes:
        return grads
    shared = [axis for axis in axes if axis not in each.buffer.local]
    if shared:
        flat = torch.cat([grad.flatten(1) for grad in grads], 1)
        flat = all_reduce_flat(
            flat, mesh, local=tuple(axis for axis in mesh.groups if axis not in shared)
        )
        parts = flat.split([leaf.numel for leaf in each.buffer.leaves], 1)
        grads = [part.reshape(grad.shape) for part, grad in zip(parts, grads, strict=True)]
    ranks = math.prod(mesh.groups[axis].size for axis in axes)
    return [grad / ranks for grad in grads]


def _show(trained: Sequence[UnitBuffer], grads: Sequence[Grads], on_grads: OnSampleGrads) -> None:
    """Call ``on_grads`` for each unit with the gradients of one chunk."""
    with torch.no_grad():
        shown: dict[str, dict[str, torch.Tensor]] = {}
        for unit_buffer, buffer_grads in zip(trained, grads, strict=True):
            shown.setdefault(unit_buffer.unit.name, {}).update(
                {
                    leaf.path: grad
                    for leaf, grad in zip(unit_buffer.buffer.leaves, buffer_grads, strict=True)
                }
            )
        for unit, by_path in shown.items():
            on_grads(unit, by_path)


def _norms(grads: Sequence[Grads], trained: Sequence[UnitBuffer], mesh: Mesh) -> torch.Tensor:
    """Return the norm of each sample's gradient over all buffers, in float32 or wider."""
    norms = [_norm(buffer_grads) for buffer_grads in grads]
    axes = model_axes(mesh)
    for local in dict.fromkeys(unit_buffer.buffer.local for unit_buffer in trained):
        if along := [axis for axis in axes if axis in local]:
            # The rest of these buffers lies on the ranks along these axes.
            held = [
                buffer_index
                for buffer_index, unit_buffer in enumerate(trained)
                if unit_buffer.buffer.local == local
            ]
            squares = torch.stack([norms[buffer_index].square() for buffer_index in held]).sum(0)
            squares = all_reduce_flat(
                squares, mesh, local=tuple(axis for axis in mesh.groups if axis not in along)
            )
            for buffer_index in held:
                norms[buffer_index] = (
                    squares.sqrt() if buffer_index == held[0] else torch.zeros_like(squares)
                )
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)


def _norm(grads: Grads) -> torch.Tensor:
    """Return the norm of each sample's gradient of one buffer."""
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    rows = [grad.reshape(len(grad), -1) for grad in grads if grad.numel()]
    if not rows:
        return grads[0].new_zeros(len(grads[0]), dtype=wide.to_real())
    return torch.linalg.vector_norm(
        torch.stack([norm_of_rows(row, 2.0, wide) for row in rows]), dim=0
    )


def _add(
    sums: Sequence[torch.Tensor],
    grads: Sequence[Grads],
    trained: Sequence[UnitBuffer],
    norms: torch.Tensor,
    max_norm: float | None,
    *,
    first: bool,
) -> None:
    """Add one chunk's gradients, each sample's clipped to ``max_norm``.

    Arguments:
        sums: the sum of each buffer, which the first chunk overwrites.
        grads: the gradients of each buffer.
        trained: the buffers.
        norms: the norm of each sample.
        max_norm: the bound.
        first: whether this is the first chunk.
    """
    scale = torch.ones_like(norms) if max_norm is None else (max_norm / norms).clamp(max=1.0)
    for total, buffer_grads, unit_buffer in zip(sums, grads, trained, strict=True):
        weights = scale.to(total)
        for leaf, grad in zip(unit_buffer.buffer.leaves, buffer_grads, strict=True):
            if leaf.numel:
                rows = grad.reshape(len(grad), -1).to(total.dtype)
                total.narrow(0, leaf.offset, leaf.numel).addmv_(
                    rows.t(), weights, beta=0 if first else 1
                )
        if first:
            total[unit_buffer.buffer.numel :] = 0  # the padding


def _chunks(count: int, size: int | None) -> Iterator[tuple[int, int]]:
    size = size or max(count, 1)
    return ((begin, min(begin + size, count)) for begin in range(0, count, size))


def _count(samples: list[Any]) -> int:
    """Return the number of samples, the one size of dim 0 of the batch's tensors."""
    sizes = {
        sample.shape[0]
        if isinstance(sample, torch.Tensor) and sample.ndim
        else type(sample).__name__
        for sample in samples
    }
    size = next(iter(sizes), None)
    if len(sizes) != 1 or not isinstance(size, int):
        raise ValueError(
            "the batch must be a pytree of tensors with one size of dim 0, which counts samples; "
            f"found {sorted(map(str, sizes)) or 'no leaves'}: pass what all samples share before "
            "the batch, or by keyword"
        )
    return size


def _check_samples(count: int, chunk_size: int | None, mesh: Mesh) -> None:
    """Raise on every rank unless ranks along model axes pass equally many samples."""
    axes = model_axes(mesh)
    if not axes:
        return
    counts_by_rank = all_gather_texts(
        mesh, f"{count} in chunks of {chunk_size}" if chunk_size else str(count), "samples"
    )
    first: dict[tuple[int, ...], int] = {}
    for rank, rank_text in enumerate(counts_by_rank):
        position = position_of(rank, mesh.shape)
        peer = first.setdefault(tuple(position[axis] for axis in AXES), rank)
        if rank_text != counts_by_rank[peer]:
            raise ValueError(
                f"ranks along {' and '.join(map(repr, axes))} must pass the same samples, whose "
                f"losses they compute together; found {counts_by_rank[peer]} on rank {peer} and {rank_text} on "
                f"rank {rank}: split the batch along the data axes only"
            )


def _check_unchanged(
    buffers: Sequence[UnitBuffer],
    whole: dict[tuple[str, str], torch.Tensor],
    writes: dict[tuple[str, str], int],
) -> None:
    """Raise ``RuntimeError`` if a gathered buffer was written to since it came."""
    for unit_buffer in buffers:
        if version(whole[unit_buffer.name]) != writes[unit_buffer.name]:
            raise modified_leaf(unit_buffer.unit, unit_buffer.buffer)


def _check_direct(trained: Sequence[UnitBuffer], direct: Sequence[torch.Tensor]) -> None:
    """Raise ``ValueError`` if a gradient reached a shard other than by gathering its unit."""
    # Why one tensor: the host waits once for the device, and not once for each shard.
    reached = (
        torch.stack([grad.any().to(direct[0].device) for grad in direct]).tolist() if direct else []
    )
    for unit_buffer, reached_grads in zip(trained, reached, strict=True):
        if reached_grads:
            raise ValueError(
                "per_sample_grad differentiates gathered units only; a gradient reached the shard "
                f"{unit_buffer.buffer.key!r} of unit {unit_buffer.unit.title!r} by another way, such as a "
                "penalty on the shard itself or remat around the unit: leave these out of "
                "loss_fn, and add a penalty's gradient to the result"
            )
