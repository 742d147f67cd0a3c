"""``per_sample_grad``: the mean of single samples' gradients, each clipped to a norm, plus noise.

Each rank clips and adds up its samples' gradients before anything is reduced: afterwards a gradient
is a sum over ranks, from which no sample's can be told.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch

from funcshard._utils.options import check_count, check_number
from funcshard._utils.torch_private import untraced
from funcshard.comm import Mesh, Topology, check_same
from funcshard.core import (
    BufferComm,
    Shards,
    check_callable,
    check_mesh,
    check_shards,
    psum,
    start_reduce,
)
from funcshard.plan import AXES, Box, BufferPlan, Plan, own_axes, rank_at, slice_offsets
from funcshard.train.sample_sums import (
    OnSampleGrads,
    UnitBuffer,
    buffers_of,
    model_axes,
    sum_of_samples,
)


def per_sample_grad(
    loss_fn: Callable[..., torch.Tensor],
    plan: Plan,
    mesh: Mesh,
    *,
    max_norm: float | None = None,
    noise_multiplier: float = 0.0,
    generator: torch.Generator | None = None,
    batch_size: float | None = None,
    chunk_size: int | None = None,
    on_grads: OnSampleGrads | None = None,
) -> Callable[..., tuple[tuple[torch.Tensor, torch.Tensor], Shards]]:
    """Return a function that computes the mean of the samples' clipped gradients, plus noise.

    This is the gradient of differentially private training: ``(Σ_i g_i · min(1, max_norm / |g_i|) +
    noise) / batch_size``, where ``g_i`` is the gradient of sample i of the whole world's batch.

    A call gathers each unit once and reduces it once, and your ranks may have different numbers of
    samples, or none. A rank holds all units gathered, one sum of gradients of that size, and the
    gradients of ``chunk_size`` samples at a time.

    Ranks along model axes, such as ``tensor``, work on the same samples, and the loss of a sample
    is the mean of theirs. The gradients of leaves that they share take an all-reduce for each chunk
    and buffer. docs/transforms.md explains both.

    Arguments:
        loss_fn: your ``loss_fn(shards, *rest, sample)`` returns the loss of one sample, a scalar.
            It runs under ``torch.vmap``, and may communicate by gathering units of ``plan`` and
            along model axes only. Dropout draws different numbers for each sample.
        plan: the plan of the shards.
        mesh: the ranks.
        max_norm: the largest norm of a sample's gradient; ``None`` for no clipping.
        noise_multiplier: standard deviation of the Gaussian noise that is added to the sum, in
            units of ``max_norm``. The noise is the same for any number of ranks and any strategy.
        generator: the generator of the noise, in the same state on every rank, which each call
            checks.
        batch_size: the number that the sum is divided by, such as the expected size of a batch
            whose samples are drawn at random; by default the number of samples of all ranks.
        chunk_size: the number of samples whose gradients exist at one time; by default all of this
            rank's.
        on_grads: ``on_grads(unit, grads)``, called for each chunk and unit with this rank's
            gradients before clipping, ``{path: [samples, *shape]}``, which you may change in place.

    Returns:
        ``f(shards, *rest, batch, **kwargs)``, which returns ``((losses, norms), grads)``. ``batch``
        is a pytree of tensors whose dim 0 counts this rank's samples. ``losses`` and ``norms``,
        before clipping, are this rank's, of shape ``[samples]``. ``grads`` is a tree like
        ``shards``, with ``None`` for frozen leaves.

    Raises:
        ValueError: an argument is out of range or needs another one; generators differ between
            ranks; the batch is not a pytree of tensors with one size of dim 0; trainable leaves are
            local along a data axis; ranks along a model axis pass different numbers of samples; a
            loss depends on no trainable shard; or a gradient reaches a shard other than by
            gathering its unit.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.zeros(2)}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves, x: leaves["w"] @ x, plan.units[""], mesh)
        ...     loss_fn = lambda shards, x: f(shards[""], x)
        ...     evaluate = fs.per_sample_grad(loss_fn, plan, mesh, max_norm=1.0)
        ...     batch = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        ...     (losses, norms), grads = evaluate(fs.shard(params, plan, mesh), batch)
        ...     return norms.tolist(), round(grads[""]["float32"].item(), 4)
        >>> fs.simulate(main, world_size=2)
        [([5.0, 1.0], 0.3), ([5.0, 1.0], 0.9)]

    Source: Abadi et al., "Deep learning with differential privacy", 2016, algorithm 1.
    """
    check_callable("per_sample_grad", loss_fn)
    _check_options(max_norm, noise_multiplier, generator, batch_size, chunk_size)
    check_mesh(plan, mesh)
    all_buffers = [entry for unit in plan.unit_list for entry in buffers_of(unit, mesh)]
    trained_buffers = [entry for entry in all_buffers if entry.buffer.trainable]
    for unit, buffer, _ in trained_buffers:
        if any(axis in AXES for axis in buffer.local):
            raise ValueError(
                f"per_sample_grad adds up the samples of all ranks; unit {unit.title!r} has "
                f"trainable leaves that are local to a rank, {buffer.leaves[0].path!r} first: "
                "freeze them, or make the plan without local, or local along model axes only"
            )

    @untraced
    def run(
        shards: Shards, /, *rest: Any, **kwargs: Any
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], Shards]:
        if not rest:
            raise TypeError(
                "the function takes (shards, *rest, batch), the batch as its last positional "
                "argument"
            )
        *arguments, batch = rest
        check_shards(plan, shards, mesh)
        if noise_multiplier and generator is not None:
            # Each rank adds its shard of one draw, so the generators have to agree.
            state = hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest()[:16]
            check_same(mesh, state, "the state of per_sample_grad's generator")
        losses, norms, sums = sum_of_samples(
            lambda traced, sample: loss_fn(traced, *arguments, sample, **kwargs),
            shards,
            batch,
            all_buffers,
            mesh,
            max_norm=max_norm,
            chunk_size=chunk_size,
            on_grads=on_grads,
        )
        # Note: popped, so that each sum is freed once it is reduced.
        pending = [
            start_reduce(sums.pop(0), _over_data_axes(entry, mesh), donated=True)
            for entry in trained_buffers
        ]
        # Note: with samples that are drawn at random, privacy needs the expected number here.
        divisor = batch_size
        if divisor is None:
            count = float(len(losses))
            own_count = torch.full((), count, dtype=torch.float32, device=mesh.device)
            divisor = max(psum(own_count, mesh).item(), 1.0)
        result: dict[str, dict[str, Any]] = {
            unit.name: {buffer.key: None for buffer in unit.buffers} for unit in plan.unit_list
        }
        for entry in trained_buffers:
            grad = pending.pop(0).finish()
            if noise_multiplier and generator is not None and max_norm is not None:
                deviation = noise_multiplier * max_norm
                grad += _noise(entry.buffer, grad, deviation, generator, mesh)
            result[entry.unit.name][entry.buffer.key] = grad.div_(divisor)
        return (losses, norms), result

    return run


def _noise(
    buffer: BufferPlan,
    grad: torch.Tensor,
    deviation: float,
    generator: torch.Generator,
    mesh: Mesh,
) -> torch.Tensor:
    """Return this rank's shard of the noise for a buffer."""
    # Why every rank draws noise for the whole buffer: an element's noise then does not depend
    # on how many ranks share the buffer.
    buffer_noise = torch.zeros(buffer.padded_numel, dtype=grad.dtype, device=generator.device)
    # Slices of one tensor come from one draw of the whole, so that meshes agree on the noise.
    if buffer.local:
        _draw_slices(buffer, buffer_noise, deviation, generator, mesh)
    else:
        buffer_noise[: buffer.numel].normal_(0.0, deviation, generator=generator)
    shard_rank = mesh.shard.rank if buffer.shards > 1 else 0
    return buffer_noise.view(buffer.shards, -1)[shard_rank].to(grad.device)


def _draw_slices(
    buffer: BufferPlan, out: torch.Tensor, deviation: float, generator: torch.Generator, mesh: Mesh
) -> None:
    """Put this rank's slices of noise for whole tensors into ``out``."""
    for leaf in buffer.leaves:
        # Ranks along these axes have leaves of their own, each of which gets a draw.
        own_sizes = {axis: mesh.shape.get(axis, 1) for axis in own_axes(buffer.local, leaf.cuts)}
        all_copies = out.new_empty(math.prod(own_sizes.values()), *leaf.whole_shape)
        all_copies.normal_(0.0, deviation, generator=generator)
        whole_noise = all_copies[
            rank_at({axis: mesh.position.get(axis, 0) for axis in own_sizes}, own_sizes)
        ]
        within = Box(slice_offsets(leaf.shape, leaf.cuts, mesh.position), leaf.shape)
        leaf_noise = whole_noise[within.slices].reshape(-1)
        out[leaf.offset : leaf.offset + leaf.numel] = leaf_noise


def _over_data_axes(entry: UnitBuffer, mesh: Mesh) -> BufferComm:
    axes = model_axes(mesh)
    if not axes:
        return entry.comm
    # Note: ranks along model axes have agreed on the sum already, so it counts as local there.
    local_axes = tuple(dict.fromkeys((*entry.buffer.local, *axes)))
    topology = Topology(mesh, entry.unit.sharded, local_axes)
    return dataclasses.replace(entry.comm, topology=topology)


def _check_options(
    max_norm: float | None,
    noise_multiplier: float,
    generator: torch.Generator | None,
    batch_size: float | None,
    chunk_size: int | None,
) -> None:
    if max_norm is not None:
        check_number("max_norm", max_norm, above=0, none="for no clipping")
    check_number("noise_multiplier", noise_multiplier, least=0)
    if noise_multiplier and max_norm is None:
        raise ValueError(
            "noise_multiplier is in units of max_norm; found max_norm=None, so one sample's part "
            "is unbounded; pass max_norm"
        )
    if noise_multiplier and generator is None:
        raise ValueError(
            "noise needs a generator in the same state on every rank; pass "
            "generator=torch.Generator().manual_seed(seed)"
        )
    if batch_size is not None:
        check_number("batch_size", batch_size, above=0, none="for the number of samples")
    if chunk_size is not None:
        check_count("chunk_size", chunk_size, of="samples", none="for all")
