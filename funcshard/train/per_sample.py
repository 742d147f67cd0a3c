"""``per_sample_grad``: the mean of single samples' gradients, each clipped to a norm, plus noise.

Each rank clips and adds up the gradients of its own samples, and only the sum is reduced. After the
reduction a gradient is already a sum over ranks, and no sample's own gradient can be told from it.
Ranks along a model axis compute a sample's loss together, so the gradient of each sample is added
up over them first.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils import check_count, check_number, tree, untraced
from funcshard.comm import Mesh, Topology, all_gather_texts, check_same
from funcshard.core import (
    BufferComm,
    GradReducer,
    Shards,
    activate,
    all_reduce_flat,
    check_mesh,
    check_shard,
    check_shards,
    psum,
    start_gather,
    start_reduce,
    unshard,
)
from funcshard.plan import AXES, Box, BufferPlan, Plan, UnitPlan, own_axes, position_of, rank_at, slice_offsets
from funcshard.train.clipping import norm_of_rows

__all__ = ["per_sample_grad"]

OnSampleGrads = Callable[[str, dict[str, torch.Tensor]], None]


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

    This is the gradient of differentially private training:
    ``(Σ_i g_i · min(1, max_norm / |g_i|) + noise) / batch_size``. Here ``g_i`` is the gradient of
    sample i of the whole world's batch, over all units together.

    Each rank clips the gradients of its own samples and adds them up before anything is reduced. So
    a call gathers each unit once and reduces it once, and ranks may have different numbers of
    samples, or none. A rank holds all units gathered, one sum of gradients of that size, and the
    gradients of ``chunk_size`` samples at a time.

    Ranks along model axes, such as ``tensor``, work on the same samples, and the loss of a sample
    is the mean of theirs. Of leaves that they share, the gradients of all samples are added up over
    them, in an all-reduce for each chunk and buffer. The norm counts slices of one tensor, and
    leaves that are local along model axes, on every rank, and all other leaves once.

    Arguments:
        loss_fn: ``loss_fn(shards, *rest, sample)`` returns the loss of one sample, a scalar. It
            runs under ``torch.vmap``, and must not communicate except by gathering units of
            ``plan``, and along model axes. Random operations such as dropout draw different numbers
            for each sample.
        plan: the plan of the shards.
        mesh: the ranks.
        max_norm: a sample's gradient is scaled down to this norm if its own norm is larger.
            ``None`` for no clipping.
        noise_multiplier: standard deviation of the Gaussian noise that is added to the sum, in
            units of ``max_norm``. Each element gets one draw, of a whole tensor that ranks hold in
            slices too. The noise is the same for any number of ranks and any strategy.
        generator: the generator that the noise is drawn from. It must be in the same state on every
            rank; each call checks this.
        batch_size: the number that the sum is divided by, such as the expected size of a batch
            whose samples are drawn at random. By default it is the number of samples of all ranks,
            which one further small all-reduce counts.
        chunk_size: the number of samples whose gradients exist at one time. By default it is the
            number of this rank's samples.
        on_grads: ``on_grads(unit, grads)``, called for each chunk and unit with this rank's
            gradients before clipping, ``{path: [samples, *shape]}``. It may change them in place;
            the norms are those of the changed gradients.

    Returns:
        ``f(shards, *rest, batch, **kwargs)``, which returns ``((losses, norms), grads)``. ``batch``
        is a pytree of tensors whose dim 0 counts this rank's samples. ``losses`` and ``norms`` are
        this rank's own, of shape ``[samples]``; the norms are those before clipping. ``grads`` is a
        tree like ``shards``, with ``None`` for frozen leaves.

    Raises:
        ValueError: an argument is out of range or needs another one that is missing; generators
            differ between ranks; the batch is not a pytree of tensors with one size of dim 0; the
            plan has trainable leaves that are local along a data axis; ranks along a model axis
            pass different numbers of samples; a loss depends on no trainable shard; or a gradient
            reaches a shard other than by gathering its unit.

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
    _check_options(max_norm, noise_multiplier, generator, batch_size, chunk_size)
    check_mesh(plan, mesh)
    buffers = [each for unit in plan.unit_list for each in _UnitBuffer.all_of(unit, mesh)]
    for each in buffers:
        if each.buffer.trainable and any(axis in AXES for axis in each.buffer.local):
            raise ValueError(
                f"per_sample_grad adds up the samples of all ranks; unit {each.unit.title!r} has trainable leaves that are "
                f"local to a rank, {each.buffer.leaves[0].path!r} first: freeze them, or make the plan without local, or "
                f"local along model axes only"
            )

    @untraced
    def run(shards: Shards, /, *rest: Any, **kwargs: Any) -> tuple[tuple[torch.Tensor, torch.Tensor], Shards]:
        if not rest:
            raise TypeError("the function takes (shards, *rest, batch), the batch as its last positional argument")
        *first, batch = rest
        check_shards(plan, shards)
        for unit in plan.unit_list:
            check_shard(unit, shards[unit.name], mesh)
        if noise_multiplier and generator is not None:
            state = hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest()[:16]
            check_same(mesh, state, "the state of per_sample_grad's generator")
        call = lambda local, sample: loss_fn(local, *first, sample, **kwargs)  # noqa: E731
        losses, norms, sums = _sums(call, shards, batch, buffers, mesh, max_norm, chunk_size, on_grads)
        trained = [each for each in buffers if each.buffer.trainable]
        pending = [start_reduce(sums.pop(0), each.over_data_axes(mesh), donated=True) for each in trained]
        divisor = batch_size
        if divisor is None:
            divisor = max(psum(torch.full((), float(len(losses)), device=mesh.device), mesh).item(), 1.0)
        result: dict[str, dict[str, Any]] = {
            unit.name: {buffer.key: None for buffer in unit.buffers} for unit in plan.unit_list
        }
        for each in trained:
            grad = pending.pop(0).finish()
            if noise_multiplier and generator is not None and max_norm is not None:
                grad += each.noise(grad, noise_multiplier * max_norm, generator, mesh)
            result[each.unit.name][each.buffer.key] = grad.div_(divisor)
        return (losses, norms), result

    return run


@dataclass(frozen=True, slots=True)
class _UnitBuffer:
    """One flat buffer of a unit, and how it is gathered and reduced."""

    unit: UnitPlan
    buffer: BufferPlan
    comm: BufferComm

    @classmethod
    def all_of(cls, unit: UnitPlan, mesh: Mesh) -> list[_UnitBuffer]:
        """Return the flat buffers of a unit, frozen ones included."""
        comms = unshard(lambda leaves: leaves, unit, mesh).comms
        return [cls(unit, buffer, comm) for buffer, comm in zip(unit.buffers, comms, strict=True)]

    @property
    def name(self) -> tuple[str, str]:
        """The names of the unit and of the buffer in it, which find the shard in a tree."""
        return self.unit.name, self.buffer.key

    def gather(self, shards: Shards) -> torch.Tensor:
        """Return the gathered buffer, detached."""
        return start_gather(shards[self.unit.name][self.buffer.key].detach(), self.comm).finish()

    def noise(self, grad: torch.Tensor, deviation: float, generator: torch.Generator, mesh: Mesh) -> torch.Tensor:
        """Return this rank's shard of the noise for the buffer, with zeros on the padding."""
        # Why every rank draws noise for the whole buffer: an element's noise then does not depend
        # on how many ranks share the buffer.
        whole = torch.zeros(self.buffer.padded_numel, dtype=grad.dtype, device=generator.device)
        if self.buffer.local:
            self._draw_slices(whole, deviation, generator, mesh)
        else:
            whole[: self.buffer.numel].normal_(0.0, deviation, generator=generator)
        shard = mesh.shard.rank if self.buffer.shards > 1 else 0
        return whole.view(self.buffer.shards, -1)[shard].to(grad.device)

    def _draw_slices(self, out: torch.Tensor, deviation: float, generator: torch.Generator, mesh: Mesh) -> None:
        """Draw noise for the whole tensors of local leaves; put this rank's slices into ``out``."""
        for leaf in self.buffer.leaves:
            own = {axis: mesh.shape.get(axis, 1) for axis in own_axes(self.buffer.local, leaf.cuts)}
            drawn = out.new_empty(math.prod(own.values()), *leaf.whole_shape).normal_(0.0, deviation, generator=generator)
            mine = drawn[rank_at({axis: mesh.position.get(axis, 0) for axis in own}, own)]
            within = Box(slice_offsets(leaf.shape, leaf.cuts, mesh.position), leaf.shape)
            out[leaf.offset : leaf.offset + leaf.numel] = mine[within.slices].reshape(-1)

    def over_data_axes(self, mesh: Mesh) -> BufferComm:
        """Return the communication of a sum that ranks along model axes agree on already."""
        axes = _model_axes(mesh)
        if not axes:
            return self.comm
        topology = Topology(mesh, self.unit.sharded, tuple(dict.fromkeys((*self.buffer.local, *axes))))
        return dataclasses.replace(self.comm, topology=topology)

    def over_model_axes(self, grad: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """Return the gradients of samples from those of each rank's loss; may overwrite these."""
        axes = _model_axes(mesh)
        if not axes:
            return grad
        shared = [axis for axis in axes if axis not in self.buffer.local]
        if shared:
            grad = all_reduce_flat(grad, mesh, local=tuple(axis for axis in mesh.groups if axis not in shared))
        return grad / math.prod(mesh.groups[axis].size for axis in axes)


def _model_axes(mesh: Mesh) -> list[str]:
    """Return the axes, of more than one rank, along which ranks work on the same samples."""
    return [axis for axis, _ in mesh.axes if axis not in AXES]


def _check_samples(count: int, chunk_size: int | None, mesh: Mesh) -> None:
    """Raise on every rank unless ranks along model axes pass equally many samples."""
    axes = _model_axes(mesh)
    if not axes:
        return
    found = all_gather_texts(mesh, f"{count} in chunks of {chunk_size}" if chunk_size else str(count))
    first: dict[tuple[int, ...], int] = {}
    for rank, text in enumerate(found):
        position = position_of(rank, mesh.shape)
        peer = first.setdefault(tuple(position[axis] for axis in AXES), rank)
        if text != found[peer]:
            raise ValueError(
                f"ranks along {' and '.join(map(repr, axes))} must pass the same samples, whose losses they compute "
                f"together; found {found[peer]} on rank {peer} and {text} on rank {rank}: split the batch along the data "
                f"axes only"
            )


def _sums(
    call: Callable[[Any, Any], torch.Tensor],
    shards: Shards,
    batch: Any,
    buffers: list[_UnitBuffer],
    mesh: Mesh,
    max_norm: float | None,
    chunk_size: int | None,
    on_grads: OnSampleGrads | None,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return this rank's losses and norms, and the sums of its samples' clipped gradients."""
    samples, unflatten_sample = tree.flatten(batch)
    count = _count(samples)
    _check_samples(count, chunk_size, mesh)
    trained = [each for each in buffers if each.buffer.trainable]
    gathered = {each.name: each.gather(shards) for each in buffers}

    # Why local shards are an argument too: their gradient shows whether loss_fn uses a shard other
    # than by gathering its unit. Such a gradient would be missing from the sums.
    def loss_of(fulls: list[torch.Tensor], local: list[torch.Tensor], sample: list[torch.Tensor]) -> torch.Tensor:
        given = gathered | {each.name: full for each, full in zip(trained, fulls, strict=True)}
        traced = {name: dict(shard) for name, shard in shards.items()}
        for each, shard in zip(trained, local, strict=True):
            traced[each.unit.name][each.buffer.key] = shard
        with activate(GradReducer.of_gathered([traced[unit][key] for unit, key in given], [*given.values()])):
            loss = call(traced, unflatten_sample(sample))
        if fulls and isinstance(loss, torch.Tensor) and not loss.requires_grad:
            raise ValueError(
                "loss_fn must return a loss that depends on a trainable shard of its argument; found a loss that no "
                "gradient leaves, as from no_grad, detached tensors, frozen leaves only, or shards that loss_fn did not get "
                "as its argument: compute it from the shards that loss_fn is called with"
            )
        return loss

    grads_of_samples = torch.vmap(
        torch.func.grad_and_value(loss_of, argnums=(0, 1)), (None, None, 0), randomness="different"
    )
    fulls = [gathered[each.name] for each in trained]
    local = [shards[each.unit.name][each.buffer.key].detach() for each in trained]
    # The sums have the dtype of the shards, also in a unit that computes in a narrower dtype.
    sums = [torch.zeros_like(full, dtype=shard.dtype) for full, shard in zip(fulls, local, strict=True)]
    losses, norms = [], []
    for begin, end in _chunks(count, chunk_size):
        (grads, direct), values = grads_of_samples(fulls, local, [sample[begin:end] for sample in samples])
        _check_direct(trained, direct)
        grads = [each.over_model_axes(grad, mesh) for each, grad in zip(trained, grads, strict=True)]
        if on_grads is not None:
            _show(trained, grads, on_grads)
        losses.append(values.detach())
        norms.append(_norms(grads, trained, mesh))
        _add(sums, grads, norms[-1], max_norm)
        del grads, direct  # so that the gradients of only one chunk exist at a time
    nothing = [torch.zeros(0, device=sums[0].device)] if sums else [torch.zeros(0)]
    return torch.cat(losses or nothing), torch.cat(norms or nothing), sums


def _show(trained: list[_UnitBuffer], grads: list[torch.Tensor], on_grads: OnSampleGrads) -> None:
    """Call ``on_grads`` for each unit with the gradients of one chunk.

    ``grads`` holds ``[samples, padded_numel]`` for each trained buffer.
    """
    with torch.no_grad():
        shown: dict[str, dict[str, torch.Tensor]] = {}
        for each, grad in zip(trained, grads, strict=True):
            for leaf in each.buffer.leaves:
                view = grad.narrow(1, leaf.offset, leaf.numel).view(len(grad), *leaf.shape)
                shown.setdefault(each.unit.name, {})[leaf.path] = view
        for unit, by_path in shown.items():
            on_grads(unit, by_path)


def _norms(grads: list[torch.Tensor], trained: list[_UnitBuffer], mesh: Mesh) -> torch.Tensor:
    """Return the norm of each sample's gradient over all buffers, in float32 or wider."""
    wide = [torch.promote_types(grad.dtype, torch.float32) for grad in grads]
    norms = [norm_of_rows(grad, 2.0, dtype) for grad, dtype in zip(grads, wide, strict=True)]
    axes = _model_axes(mesh)
    for local in dict.fromkeys(each.buffer.local for each in trained):
        if along := [axis for axis in axes if axis in local]:
            # The rest of these buffers lies on the ranks along these axes.
            held = [number for number, each in enumerate(trained) if each.buffer.local == local]
            squares = torch.stack([norms[number].square() for number in held]).sum(0)
            squares = all_reduce_flat(squares, mesh, local=tuple(axis for axis in mesh.groups if axis not in along))
            for number in held:
                norms[number] = squares.sqrt() if number == held[0] else torch.zeros_like(squares)
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)


def _add(sums: list[torch.Tensor], grads: list[torch.Tensor], norms: torch.Tensor, max_norm: float | None) -> None:
    """Add one chunk's gradients to ``sums``, each sample's clipped to ``max_norm``."""
    scale = torch.ones_like(norms) if max_norm is None else (max_norm / norms).clamp(max=1.0)
    for total, grad in zip(sums, grads, strict=True):
        total += scale.to(total) @ grad.to(total.dtype)


def _chunks(count: int, size: int | None) -> Iterator[tuple[int, int]]:
    size = size or max(count, 1)
    return ((begin, min(begin + size, count)) for begin in range(0, count, size))


def _check_direct(trained: list[_UnitBuffer], direct: list[torch.Tensor]) -> None:
    """Raise ``ValueError`` if a gradient reached a shard other than by gathering its unit."""
    # Why one tensor: the host waits once for the device, and not once for each shard.
    reached = torch.stack([grad.any().to(direct[0].device) for grad in direct]).tolist() if direct else []
    for each, found in zip(trained, reached, strict=True):
        if found:
            raise ValueError(
                f"per_sample_grad differentiates gathered units only; a gradient reached the shard {each.buffer.key!r} of "
                f"unit {each.unit.title!r} by another way, such as a penalty on the shard itself or remat around the unit: "
                f"leave these out of loss_fn, and add a penalty's gradient to the result"
            )


def _count(samples: list[Any]) -> int:
    """Return the number of samples, the one size of dim 0 of the batch's tensors."""
    sizes = {
        sample.shape[0] if isinstance(sample, torch.Tensor) and sample.ndim else type(sample).__name__ for sample in samples
    }
    size = next(iter(sizes), None)
    if len(sizes) != 1 or not isinstance(size, int):
        raise ValueError(
            f"the batch must be a pytree of tensors with one size of dim 0, which counts samples; found "
            f"{sorted(map(str, sizes)) or 'no leaves'}: pass what all samples share before the batch, or by keyword"
        )
    return size


def _check_options(
    max_norm: float | None,
    noise_multiplier: float,
    generator: torch.Generator | None,
    batch_size: float | None,
    chunk_size: int | None,
) -> None:
    if max_norm is not None:
        check_number("max_norm", max_norm, above=0, none="for no clipping", remedy="pass None for the norms alone")
    check_number("noise_multiplier", noise_multiplier, least=0, remedy="pass 0.0 for no noise")
    if noise_multiplier and max_norm is None:
        raise ValueError(
            "noise_multiplier is in units of max_norm; found max_norm=None, so one sample's part is unbounded; pass max_norm"
        )
    if noise_multiplier and generator is None:
        raise ValueError(
            "noise needs a generator in the same state on every rank; pass generator=torch.Generator().manual_seed(seed)"
        )
    if batch_size is not None:
        none = "for the number of samples"
        check_number("batch_size", batch_size, above=0, none=none, remedy=f"pass None {none}")
    if chunk_size is not None:
        check_count("chunk_size", chunk_size, of="samples", none="for all", remedy="pass None for all")
