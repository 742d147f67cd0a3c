"""``torch.func`` transforms on shards, against the same transforms on whole parameters.

Ours runs on 2 ranks with one thread each, the peer in one process (that of rank 0) with 2 threads.
Both compute the same: each of our ranks takes half of the samples, and all models of an ensemble,
whose parameters it holds halves of; the peer takes all samples and whole parameters. A turn ends
with this rank's part of the result, which is sharded; the peer has the whole. Attention is torch's
plain one on both sides, because the fused one has neither a rule for ``vmap`` nor a forward-mode
derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import funcshard as fs
from benchmarks.life import sides
from benchmarks.life.case import Case, Place, Turn
from benchmarks.shapes import Shape

MODELS = 8
SAMPLES = 8  # of all ranks together
MAX_NORM = 1.0


def _shape(place: Place, **sizes: int) -> Shape:
    return sides.gpt(place, batch=SAMPLES, context=32, **sizes)


def _plain(run: Callable[[], Any]) -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        return run()


class _Ours(sides.Ours):
    """The model on shards, and this rank's samples."""

    def __init__(self, place: Place, **sizes: int) -> None:
        super().__init__(_shape(place, **sizes))
        self.part = [part.chunk(place.size)[place.rank] for part in self.shape.batches(0)[0]]

    def norm(self, shards: Any) -> float:
        """Return the norm of a whole tree, or of a stack of trees."""
        return fs.psum(sum(leaf.square().sum() for leaf in sides.leaves(shards)), self.mesh).sqrt().item()


class _Whole:
    """The model with whole parameters, in one process."""

    def __init__(self, place: Place, **sizes: int) -> None:
        self.shape, self.place = _shape(place, **sizes), place
        self.module = self.shape.module()
        self.params = {name: value.detach() for name, value in self.module.named_parameters()}
        self.batch = self.shape.batches(0)[0]

    def loss(self, params: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.shape.loss(functional_call(self.module, params, (inputs,)), targets)

    def turn(self, run: Callable[[], Any], check: Callable[[Any], list[float]]) -> Turn:
        """Return the turn of rank 0, which takes as many threads as there are ranks."""
        place = self.place

        def turn() -> list[float] | None:
            torch.set_num_threads(place.size if place.rank == 0 else 1)
            try:
                result = place.turn(lambda: _plain(run) if place.rank == 0 else None, lambda result: result)()
            finally:
                torch.set_num_threads(1)
            return check(result) if place.rank == 0 else None  # nothing to compare on the others

        return turn


def _norm(values: Any) -> float:
    return torch.nn.utils.get_total_norm(list(values)).item()


def _our_per_sample(place: Place) -> Turn:
    ours = _Ours(place)
    loss = lambda shards, sample: ours.loss(shards, sample[0][None], sample[1][None])  # noqa: E731
    evaluate = fs.per_sample_grad(loss, ours.plan, ours.mesh, max_norm=MAX_NORM)
    return place.turn(lambda: _plain(lambda: evaluate(ours.shards, ours.part)), lambda result: [ours.norm(result[1])])


def _their_per_sample(place: Place) -> Turn:
    """Clip the gradients of samples and average them, as the tutorial of ``torch.func`` has them."""
    whole = _Whole(place)
    each = vmap(grad(lambda params, x, y: whole.loss(params, x[None], y[None])), (None, 0, 0))

    def run() -> list[torch.Tensor]:
        grads = each(whole.params, *whole.batch)
        norms = torch.stack([value.flatten(1).norm(dim=1) for value in grads.values()]).norm(dim=0)
        factors = (MAX_NORM / norms).clamp(max=1.0) / SAMPLES
        return [torch.einsum("s,s...->...", factors, value) for value in grads.values()]

    return whole.turn(run, lambda grads: [_norm(grads)])


def _directions(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(value.shape, generator=generator) for name, value in params.items()}


def _our_hvp(place: Place) -> Turn:
    ours = _Ours(place)
    direction = fs.from_state_dict(_directions(fs.gather(ours.shards, ours.plan, ours.mesh)), ours.plan, ours.mesh)
    of_loss = grad(lambda shards: ours.loss(shards, *ours.part) / place.size)
    run = lambda: jvp(of_loss, (ours.shards,), (direction,))[1]  # noqa: E731
    return place.turn(lambda: _plain(run), lambda product: [ours.norm(product)])


def _their_hvp(place: Place) -> Turn:
    whole = _Whole(place)
    direction = _directions(whole.params)
    of_loss = grad(lambda params: whole.loss(params, *whole.batch))
    return whole.turn(lambda: jvp(of_loss, (whole.params,), (direction,))[1], lambda product: [_norm(product.values())])


def _our_ensemble(place: Place) -> Turn:
    ours = _Ours(place, width=192)
    # Model i has the parameters of the first one times 1 + i / 8.
    scales = 1 + torch.arange(MODELS)[:, None] / 8
    stack = {unit: {key: leaf * scales for key, leaf in own.items()} for unit, own in ours.shards.items()}
    losses_of = vmap(lambda shards: ours.loss(shards, *ours.part))

    def loss_fn(stack: Any) -> tuple[torch.Tensor, torch.Tensor]:
        losses = losses_of(stack)
        return losses.sum(), losses.detach()

    evaluate = fs.value_and_grad(loss_fn, has_aux=True, mesh=ours.mesh)

    def check(result: Any) -> list[float]:
        (_, losses), grads = result
        return [*fs.pmean(losses, ours.mesh).tolist(), ours.norm(grads)]

    return place.turn(lambda: _plain(lambda: evaluate(stack)), check)


def _their_ensemble(place: Place) -> Turn:
    whole = _Whole(place, width=192)
    modules = [whole.shape.module() for _ in range(MODELS)]
    for model, each in enumerate(modules):
        for p in each.parameters():
            p.data.mul_(1 + model / 8)
    stack, _ = stack_module_state(modules)
    losses_of = vmap(lambda params: whole.loss(params, *whole.batch))

    def run() -> tuple[torch.Tensor, Any]:
        losses = losses_of(stack)
        return losses.detach(), torch.autograd.grad(losses.sum(), list(stack.values()))

    return whole.turn(run, lambda result: [*result[0].tolist(), _norm(result[1])])


_PEER = "torch.func, whole, one process"
CASES = (
    Case("per_sample", "clipped gradients of 8 samples, GPT of 10.8 M", _PEER, 1.15, _our_per_sample, _their_per_sample),
    Case("hvp", "product with the Hessian, GPT of 10.8 M", _PEER, 1.15, _our_hvp, _their_hvp),
    Case("ensemble", "gradients of 8 models under vmap", _PEER, 1.3, _our_ensemble, _their_ensemble),
)
