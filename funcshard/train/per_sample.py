"""``per_sample_grad``: the gradient of every sample by itself, clipped, added up, noised, and only then reduced."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils import tree, untraced
from funcshard.comm import Mesh, check_same
from funcshard.core import (
    Link,
    Shards,
    check_mesh,
    check_shard,
    check_shards,
    open_step,
    psum,
    start_gather,
    start_reduce,
    unshard,
)
from funcshard.plan import BufferPlan, Plan, UnitPlan

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
    """Turn the loss of one sample into a function that returns the mean of the samples' clipped gradients.

    The step of differentially private training: ``(Σ_i g_i · min(1, max_norm / |g_i|) + noise) / batch_size``, where
    ``g_i`` is the gradient of sample i of the whole world's batch, over all units together. Samples are taken one by one
    before anything is reduced. So each unit is gathered once and reduced once in a call, and ranks may have different
    numbers of samples, or none. Memory: every unit gathered, one sum of that size, and ``chunk_size`` such gradients.

    Arguments:
        loss_fn: ``loss_fn(shards, *rest, sample)`` -> the loss of one sample, a scalar. It is run under ``torch.vmap`` and
            must not communicate besides gathering units of ``plan``; random operations differ from sample to sample.
        plan: the plan of the shards.
        mesh: the ranks.
        max_norm: the norm that a sample's gradient is scaled down to where it is larger; ``None`` for no clipping.
        noise_multiplier: standard deviation of the Gaussian noise on the sum, in units of ``max_norm``. Every element gets
            one draw, the same for any number of ranks and any strategy.
        generator: where the noise comes from; it has to be in the same state on every rank, which is checked.
        batch_size: what the sum is divided by, such as the expected size of the batch where samples are drawn at random;
            by default the number of samples of all ranks, which one more small all-reduce counts.
        chunk_size: how many samples' gradients exist at a time; by default all of this rank's.
        on_grads: ``on_grads(unit, grads)``, called for each chunk and unit with ``{path: [samples, *shape]}``, this rank's
            gradients before clipping. It may change them in place; norms are taken of what it leaves.

    Returns:
        ``f(shards, *rest, batch, **kwargs)`` -> ``((losses, norms), grads)``; ``batch`` is a pytree of tensors whose dim 0
        counts this rank's samples. ``losses`` and ``norms`` (before clipping) have shape ``[samples]`` and are this rank's
        own; ``grads`` is like ``shards``, with ``None`` for what is frozen.

    Raises:
        ValueError: an argument is out of range or lacks another one, generators differ between ranks, the batch is no
            pytree of tensors with one size of dim 0, the plan has trainable leaves that are local to a rank, or a gradient
            reaches shards by other ways than gathering them.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.zeros(2)}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves, x: leaves["w"] @ x, plan.units[""], mesh)
        ...     evaluate = fs.per_sample_grad(lambda shards, x: f(shards[""], x), plan, mesh, max_norm=1.0)
        ...     batch = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        ...     (losses, norms), grads = evaluate(fs.shard(params, plan, mesh), batch)
        ...     return norms.tolist(), round(grads[""]["float32"].item(), 4)
        >>> fs.simulate(main, world_size=2)
        [([5.0, 1.0], 0.3), ([5.0, 1.0], 0.9)]

    Source: Abadi et al., "Deep learning with differential privacy", 2016, algorithm 1.
    """
    _check_options(max_norm, noise_multiplier, generator, batch_size, chunk_size)
    check_mesh(plan, mesh)
    places = [place for unit in plan.unit_list for place in _Place.all_of(unit, mesh)]
    for place in places:
        if place.trained and place.buffer.local:
            raise ValueError(
                f"per_sample_grad adds up the samples of all ranks; unit {place.unit.title!r} has trainable leaves that are "
                f"local to a rank, {place.buffer.leaves[0].path!r} first: freeze them, or make the plan without local"
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
        losses, norms, sums = _sums(call, shards, batch, places, max_norm, chunk_size, on_grads)
        trained = [place for place in places if place.trained]
        pending = [start_reduce(sums.pop(0), place.link, donated=True) for place in trained]
        divisor = batch_size
        if divisor is None:
            divisor = max(psum(torch.tensor(float(len(losses)), device=mesh.device), mesh).item(), 1.0)
        found: dict[str, dict[str, Any]] = {
            unit.name: {buffer.key: None for buffer in unit.buffers} for unit in plan.unit_list
        }
        for place in trained:
            grad = pending.pop(0).finish()
            if noise_multiplier and generator is not None and max_norm is not None:
                grad += place.noise(grad, noise_multiplier * max_norm, generator, mesh)
            found[place.unit.name][place.buffer.key] = grad.div_(divisor)
        return (losses, norms), found

    return run


@dataclass(frozen=True, slots=True)
class _Place:
    """One flat buffer of the plan."""

    unit: UnitPlan
    buffer: BufferPlan
    link: Link
    trained: bool

    @classmethod
    def all_of(cls, unit: UnitPlan, mesh: Mesh) -> list[_Place]:
        links = unshard(lambda leaves: leaves, unit, mesh).links
        return [cls(unit, buffer, link, buffer.trainable) for buffer, link in zip(unit.buffers, links, strict=True)]

    @property
    def name(self) -> tuple[str, str]:
        return self.unit.name, self.buffer.key

    def gather(self, shards: Shards) -> torch.Tensor:
        """The whole buffer, a constant."""
        return start_gather(shards[self.unit.name][self.buffer.key].detach(), self.link).finish()

    def noise(self, grad: torch.Tensor, deviation: float, generator: torch.Generator, mesh: Mesh) -> torch.Tensor:
        """This rank's slice of noise for the whole buffer, none on its padding."""
        # drawn whole on every rank, so that it is one and the same noise however the buffer is cut
        whole = torch.zeros(self.buffer.padded_numel, dtype=grad.dtype, device=generator.device)
        whole[: self.buffer.numel].normal_(0.0, deviation, generator=generator)
        own = mesh.shard.rank if self.buffer.shards > 1 else 0
        return whole.view(self.buffer.shards, -1)[own].to(grad.device)


def _sums(
    call: Callable[[Any, Any], torch.Tensor],
    shards: Shards,
    batch: Any,
    places: list[_Place],
    max_norm: float | None,
    chunk_size: int | None,
    on_grads: OnSampleGrads | None,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return losses, norms, and this rank's sum of scaled gradients of each trained buffer."""
    samples, of_sample = tree.flatten(batch)
    count = _count(samples)
    trained = [place for place in places if place.trained]
    fulls = {place.name: place.gather(shards) for place in places}

    def loss_of(varied: list[torch.Tensor], own: list[torch.Tensor], sample: list[torch.Tensor]) -> torch.Tensor:
        given = fulls | {place.name: full for place, full in zip(trained, varied, strict=True)}
        local = {name: dict(shard) for name, shard in shards.items()}
        for place, shard in zip(trained, own, strict=True):
            local[place.unit.name][place.buffer.key] = shard
        with open_step([local[unit][key] for unit, key in given]) as step:
            step.given = dict(enumerate(given.values()))
            return call(local, of_sample(sample))

    each = torch.vmap(torch.func.grad_and_value(loss_of, argnums=(0, 1)), (None, None, 0), randomness="different")
    varied = [fulls[place.name] for place in trained]
    own = [shards[place.unit.name][place.buffer.key].detach() for place in trained]
    # added up in the dtype of the shards, also where the unit computes in a narrower one
    sums = [torch.zeros_like(full, dtype=shard.dtype) for full, shard in zip(varied, own, strict=True)]
    losses, norms = [], []
    for begin, end in _chunks(count, chunk_size):
        (grads, direct), values = each(varied, own, [sample[begin:end] for sample in samples])
        _check_direct(trained, direct)
        losses.append(values.detach())
        norms.append(_look(trained, grads, on_grads))
        _add(sums, grads, norms[-1], max_norm)
        del grads, direct  # before there are the next chunk's
    nothing = [torch.zeros(0, device=sums[0].device)] if sums else [torch.zeros(0)]
    return torch.cat(losses or nothing), torch.cat(norms or nothing), sums


def _look(trained: list[_Place], grads: list[torch.Tensor], on_grads: OnSampleGrads | None) -> torch.Tensor:
    """Show one chunk's gradients, ``[samples, padded_numel]`` each, and return their norms over all units."""
    if on_grads is not None:
        with torch.no_grad():
            shown: dict[str, dict[str, torch.Tensor]] = {}
            for place, grad in zip(trained, grads, strict=True):
                for leaf in place.buffer.leaves:
                    view = grad.narrow(1, leaf.offset, leaf.numel).view(len(grad), *leaf.shape)
                    shown.setdefault(place.unit.name, {})[leaf.path] = view
            for unit, by_path in shown.items():
                on_grads(unit, by_path)
    wide = [torch.promote_types(grad.dtype, torch.float32) for grad in grads]
    norms = [torch.linalg.vector_norm(grad, dim=1, dtype=dtype) for grad, dtype in zip(grads, wide, strict=True)]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)


def _add(sums: list[torch.Tensor], grads: list[torch.Tensor], norm: torch.Tensor, max_norm: float | None) -> None:
    """Add one chunk's gradients to ``sums``, each scaled to at most ``max_norm``."""
    scale = torch.ones_like(norm) if max_norm is None else (max_norm / norm).clamp(max=1.0)
    for total, grad in zip(sums, grads, strict=True):
        total += scale.to(total) @ grad.to(total.dtype)


def _chunks(count: int, size: int | None) -> Iterator[tuple[int, int]]:
    step = size or max(count, 1)
    return ((begin, min(begin + step, count)) for begin in range(0, count, step))


def _check_direct(trained: list[_Place], direct: list[torch.Tensor]) -> None:
    for place, grad in zip(trained, direct, strict=True):
        if grad.any():
            raise ValueError(
                f"per_sample_grad needs shards that are gathered as they are; a gradient reached the shard "
                f"{place.buffer.key!r} of unit {place.unit.title!r} by another way, such as a penalty on the shard itself "
                f"or remat around the unit: leave these out of loss_fn; a penalty's gradient can be added to the result"
            )


def _count(samples: list[Any]) -> int:
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
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, or None for no clipping; found {max_norm}")
    if not 0 <= noise_multiplier < float("inf"):
        raise ValueError(f"noise_multiplier must be a finite number, at least 0; found {noise_multiplier}")
    if noise_multiplier and max_norm is None:
        raise ValueError("noise is in units of max_norm, without which one sample's part is unbounded; pass max_norm")
    if noise_multiplier and generator is None:
        raise ValueError(
            "noise needs a generator in the same state on every rank; pass generator=torch.Generator().manual_seed(seed)"
        )
    if batch_size is not None and not batch_size > 0:
        raise ValueError(f"batch_size must be positive, or None for the number of samples; found {batch_size}")
    if chunk_size is not None and not (isinstance(chunk_size, int) and chunk_size >= 1):
        raise ValueError(f"chunk_size must be a whole number of samples, at least 1, or None for all; found {chunk_size!r}")
