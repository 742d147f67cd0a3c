"""``per_sample_grad``: the mean of single samples' gradients, each clipped to a norm, plus noise.

Each rank clips and adds up its samples' gradients before anything is reduced: afterwards a gradient
is a sum over ranks, from which no sample's can be told. ``SampleWalk`` takes the gradients with
respect to gathered leaves, with ``vmap``. They stay apart by leaf: to put each sample's into a flat
buffer would copy all of them once more.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree
from funcshard._utils.options import check_count, check_number
from funcshard._utils.torch_private import untraced, version
from funcshard.comm import Mesh, all_gather_texts, check_same
from funcshard.core import (
    CONSTANT,
    BufferComm,
    GradReducer,
    Leaves,
    Shards,
    activate,
    all_reduce_flat,
    check_callable,
    check_mesh,
    check_shards,
    decoded_views,
    modified_leaf,
    psum,
    start_gather,
    start_reduce,
    unit_comms,
)
from funcshard.plan import (
    AXES,
    Box,
    BufferPlan,
    Plan,
    own_axes,
    position_of,
    rank_at,
    slice_offsets,
)
from funcshard.train.clipping import norm_of_rows

OnSampleGrads = Callable[[str, dict[str, torch.Tensor]], None]
Grads = list[torch.Tensor]  # ``[samples, *shape]`` of each leaf of a buffer


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
    for unit in plan.unit_list:
        for buffer in unit.buffers:
            if buffer.trainable and any(axis in AXES for axis in buffer.local):
                raise ValueError(
                    f"per_sample_grad adds up the samples of all ranks; unit {unit.title!r} has "
                    f"trainable leaves that are local to a rank, {buffer.leaves[0].path!r} first: "
                    "freeze them, or make the plan without local, or local along model axes only"
                )

    @untraced
    def run(
        shards: Shards, /, *rest: Any, **kwargs: Any
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], Shards]:
        check_shards(plan, shards, mesh)
        if noise_multiplier and generator is not None:
            # Each rank adds its shard of one draw, so the generators have to agree.
            state = hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest()[:16]
            check_same(mesh, state, "the state of per_sample_grad's generator")
        walk = SampleWalk("per_sample_grad", loss_fn, plan, mesh, shards, rest, kwargs, chunk_size)
        trained = walk.trained
        # The sums have the dtype of the shards, also in a unit that computes in a narrower dtype.
        sums = [torch.zeros_like(entry.whole, dtype=entry.shard.dtype) for entry in trained]

        def gradient(sample: Any) -> Any:
            leaves = [entry.leaves for entry in trained]
            return torch.func.grad_and_value(walk.loss)(leaves, sample)

        def add(grads: list[Grads]) -> torch.Tensor:
            for i, entry in enumerate(trained):
                grads[i] = _over_model_axes(grads[i], entry.comm)
            if on_grads is not None:
                _call_hook(trained, grads, on_grads)
            norms = _norms(grads, trained, mesh)
            _add(sums, grads, trained, norms, max_norm)
            return norms

        losses, norms = walk.chunks(gradient, add)
        # Note: popped, so that each sum is freed once it is reduced.
        pending = [
            start_reduce(sums.pop(0), _over_data_axes(entry.comm), donated=True)
            for entry in trained
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
        for entry in trained:
            grad = pending.pop(0).finish()
            if noise_multiplier and generator is not None and max_norm is not None:
                deviation = noise_multiplier * max_norm
                grad += _noise(entry.comm.plan, grad, deviation, generator, mesh)
            result[entry.unit][entry.comm.buffer] = grad.div_(divisor)
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


def _over_data_axes(comm: BufferComm) -> BufferComm:
    # Note: ranks along model axes have agreed on the sum already, so it counts as local there.
    topology = comm.topology
    local_axes = tuple(dict.fromkeys((*topology.local, *model_axes(comm.mesh))))
    return dataclasses.replace(comm, topology=dataclasses.replace(topology, local=local_axes))


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


# --- the gradients of single samples --------------------------------------------------------------


class GatheredBuffer(NamedTuple):
    """A buffer that was gathered for one call.

    Attributes:
        unit: name of its unit.
        comm: its communication.
        shard: its shard in the tree that the loss function gets.
        whole: the gathered buffer.
        leaves: the leaves in it.
        writes: its version when it came.
    """

    unit: str
    comm: BufferComm
    shard: torch.Tensor
    whole: torch.Tensor
    leaves: list[torch.Tensor]
    writes: int


class SampleWalk:
    """One call of a function of single samples: their losses, in chunks, on gathered units.

    Attributes:
        gathered: all buffers of the plan.
        trained: the trainable ones.
    """

    def __init__(
        self,
        caller: str,
        loss_fn: Callable[..., torch.Tensor],
        plan: Plan,
        mesh: Mesh,
        shards: Shards,
        rest: Sequence[Any],
        kwargs: dict[str, Any],
        chunk_size: int | None,
    ) -> None:
        if not rest:
            raise TypeError(
                "the function takes (shards, *rest, batch), the batch as its last positional "
                "argument"
            )
        *self._arguments, batch = rest
        self._caller, self._loss_fn, self._kwargs, self._mesh = caller, loss_fn, kwargs, mesh
        self._samples, self._unflatten = tree.flatten(batch)
        self._count = _sample_count(self._samples)
        self._chunk_size = chunk_size or max(self._count, 1)
        _check_samples(self._count, chunk_size, mesh)
        self.gathered = [
            _gather(unit.name, comm, shards)
            for unit in plan.unit_list
            for comm in unit_comms(unit, mesh, None)
        ]
        self.trained = [entry for entry in self.gathered if entry.comm.plan.trainable]
        self._shards = {name: dict(unit_shards) for name, unit_shards in shards.items()}
        for entry in self.gathered:
            self._shards[entry.unit][entry.comm.buffer] = entry.shard
        self._depends = not self.trained  # whether a gradient leaves the loss

    def loss(self, trained_leaves: Leaves, sample: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of one sample, given the leaves of each trainable buffer."""
        remaining_leaves = iter(trained_leaves)
        leaves = [
            next(remaining_leaves) if entry.comm.plan.trainable else entry.leaves
            for entry in self.gathered
        ]
        with activate(GradReducer([entry.shard for entry in self.gathered], gathered=leaves)):
            loss = self._loss_fn(
                self._shards, *self._arguments, self._unflatten(sample), **self._kwargs
            )
        # Inside a transform a loss requires a gradient if one reaches the leaves.
        self._depends = self._depends or getattr(loss, "requires_grad", False)
        return loss

    def chunks(
        self, derive: Callable[[Any], Any], norms_of: Callable[[Any], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses and norms of this rank's samples.

        Arguments:
            derive: ``derive(sample)`` returns derivatives of ``loss``, and the loss.
            norms_of: called with the derivatives of a chunk of samples; returns their norms.
        """
        # Note: each sample draws its own dropout.
        of_samples = torch.vmap(derive, randomness="different")
        # A rank may have no samples.
        nothing = torch.zeros(0, device=self._mesh.device, dtype=torch.float32)
        losses, norms = [], []
        for begin in range(0, self._count, self._chunk_size):
            chunk = [sample[begin : begin + self._chunk_size] for sample in self._samples]
            with torch.enable_grad():
                derivatives, chunk_losses = of_samples(chunk)
            self._check(chunk_losses)
            losses.append(chunk_losses.detach())
            norms.append(norms_of(derivatives))
            del derivatives  # so that the gradients of only one chunk exist at a time
        return torch.cat(losses or [nothing]), torch.cat(norms or [nothing])

    def _check(self, losses: torch.Tensor) -> None:
        """Raise if the loss wrote to gathered leaves, depends on none, or on shards directly."""
        for entry in self.gathered:
            # No gradient would tell.
            if version(entry.whole) != entry.writes:
                raise modified_leaf(entry.unit, entry.comm.plan)
        direct_grads: Sequence[Any] = ()
        if losses.requires_grad:
            direct_grads = torch.autograd.grad(
                losses,
                [entry.shard for entry in self.trained],
                torch.ones_like(losses),
                allow_unused=True,
                retain_graph=True,
            )
        for entry, grad in zip(self.trained, direct_grads, strict=False):
            if grad is not None and grad.any():
                raise ValueError(
                    f"{self._caller} differentiates gathered units only; a gradient reached "
                    f"{entry.comm.label} by another way, such as a penalty on the shard itself or "
                    "remat around the unit: leave these out of loss_fn, and add a "
                    "penalty's gradient to the result"
                )
        if not self._depends:
            raise ValueError(CONSTANT)


def _gather(unit: str, comm: BufferComm, shards: Shards) -> GatheredBuffer:
    shard = shards[unit][comm.buffer].detach()
    whole = start_gather(shard, comm, read_only=True).finish()
    return GatheredBuffer(
        unit=unit,
        comm=comm,
        # No gradient reaches a shard that is only gathered, because its unit gets gathered leaves.
        # A loss that requires a gradient outside of torch.func.grad uses it in another way.
        shard=shard.detach().requires_grad_(comm.plan.trainable),
        whole=whole,
        leaves=decoded_views(whole, comm.plan),
        writes=version(whole),
    )


def model_axes(mesh: Mesh) -> list[str]:
    """Return the axes, of more than one rank, along which ranks work on the same samples."""
    return [axis for axis, _ in mesh.axes if axis not in AXES]


def local_model_axes(buffer: BufferPlan, mesh: Mesh) -> tuple[str, ...]:
    """Return the model axes along which ranks have other parts of a sample's gradient."""
    return tuple(axis for axis in model_axes(mesh) if axis in buffer.local)


def over_axes(squares: torch.Tensor, axes: tuple[str, ...], mesh: Mesh) -> torch.Tensor:
    """Return the sum of squares, which may change, of the parts on the ranks along ``axes``."""
    if not axes:
        return squares
    other_axes = tuple(axis for axis in mesh.groups if axis not in axes)
    return all_reduce_flat(squares, mesh, local=other_axes)


def _over_model_axes(grads: Grads, comm: BufferComm) -> Grads:
    """Return the gradients of samples, contiguous, from those of each rank's loss."""
    grads, mesh = [grad.detach().contiguous() for grad in grads], comm.mesh
    all_axes = model_axes(mesh)
    if not all_axes:
        return grads
    shared_axes = tuple(axis for axis in all_axes if axis not in comm.plan.local)
    if shared_axes:
        flat_grads = torch.cat([grad.reshape(len(grad), -1) for grad in grads], 1)
        flat_grads = over_axes(flat_grads, shared_axes, mesh)
        summed_parts = flat_grads.split([leaf.numel for leaf in comm.plan.leaves], 1)
        grads = [part.reshape(grad.shape) for part, grad in zip(summed_parts, grads, strict=True)]
    num_ranks = math.prod(mesh.groups[axis].size for axis in all_axes)
    return [grad / num_ranks for grad in grads]


def _call_hook(
    trained: Sequence[GatheredBuffer], grads: Sequence[Grads], on_grads: OnSampleGrads
) -> None:
    by_unit: dict[str, dict[str, torch.Tensor]] = {}
    for entry, buffer_grads in zip(trained, grads, strict=True):
        by_path = by_unit.setdefault(entry.unit, {})
        for leaf, grad in zip(entry.comm.plan.leaves, buffer_grads, strict=True):
            by_path[leaf.path] = grad
    with torch.no_grad():
        for unit_name, by_path in by_unit.items():
            on_grads(unit_name, by_path)


def _norms(grads: Sequence[Grads], trained: Sequence[GatheredBuffer], mesh: Mesh) -> torch.Tensor:
    """Return the norm of each sample's gradient over all buffers, in float32 or wider."""
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for entry, buffer_grads in zip(trained, grads, strict=True):
        local_axes = local_model_axes(entry.comm.plan, mesh)
        by_axes.setdefault(local_axes, []).append(_norm(buffer_grads))
    axes_norms = []
    for local_axes, buffer_norms in by_axes.items():
        # Buffers along the same axes share one all-reduce.
        norm = torch.linalg.vector_norm(torch.stack(buffer_norms), dim=0)
        if local_axes:  # the rest of these buffers lies on the ranks along these axes
            norm = over_axes(norm.square(), local_axes, mesh).sqrt()
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
        for leaf, grad in zip(entry.comm.plan.leaves, buffer_grads, strict=True):
            if leaf.numel:
                grad_rows = grad.reshape(len(grad), -1).to(buffer_sum.dtype)
                # Why a product: it clips and adds in one pass, without a copy of the clipped
                # gradients.
                buffer_sum.narrow(0, leaf.offset, leaf.numel).addmv_(grad_rows.t(), sample_weights)


def _sample_count(samples: list[Any]) -> int:
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


def _check_samples(count: int, chunk_size: int | None, mesh: Mesh) -> None:
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
