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
import torch.distributed as dist
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import funcshard as fs
from benchmarks.life.case import Case, Place, Turn
from benchmarks.shapes import Shape
from funcshard.demo.gpt import GPT, Block, GPTConfig

__all__ = ["CASES"]

MODELS = 8
SAMPLES = 8  # of all ranks together
MAX_NORM = 1.0

Model = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]  # (parameters, inputs, targets) → mean loss


def _shape(place: Place, **sizes: int) -> Shape:
    """Return a GPT on batches of ``SAMPLES``."""
    if place.tiny:
        sizes = {"width": 8, "layers": 2, "heads": 2, "context": 4, "vocabulary": 11}
    config = GPTConfig(**sizes)
    return Shape("GPT", lambda: GPT(config), Block, SAMPLES, config.context, config.vocabulary, config.heads)


def _part(place: Place, shape: Shape) -> list[torch.Tensor]:
    """Return this rank's samples and their targets."""
    return [each.chunk(place.size)[place.rank] for each in shape.batches(0)[0]]


def _directions(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(value.shape, generator=generator) for name, value in params.items()}


class _Ours:
    """The model on shards."""

    def __init__(self, shape: Shape) -> None:
        module = shape.module()
        self.mesh = fs.init_mesh(device="cpu")
        apply, self.params, self.buffers = fs.make_functional(module)
        self.plan = fs.make_plan(self.params, self.mesh, units=fs.wrap.by_class(shape.unit)(module))
        self.shape, self.sharded = shape, fs.fully_shard(apply, self.plan, self.mesh)
        self.shards = fs.shard(self.params, self.plan, self.mesh)

    def loss(self, shards: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.shape.loss(self.sharded(shards, self.buffers, inputs), targets)

    def norm(self, shards: Any) -> float:
        """Return the norm of a whole tree, or of a stack of trees."""
        square = sum(leaf.square().sum() for unit in shards.values() for leaf in unit.values())
        return fs.psum(square, self.mesh).sqrt().item()


def _alone(place: Place, run: Callable[[], Any]) -> Any:
    """Time ``run`` on rank 0 with as many threads as there are ranks; return its result there."""
    result = None
    if place.rank == 0:
        torch.set_num_threads(place.size)
    try:
        with place.timed():
            if place.rank == 0:
                with sdpa_kernel(SDPBackend.MATH):
                    result = run()
    finally:
        torch.set_num_threads(1)
    return result


def _from_rank_0(numbers: list[float] | None) -> list[float]:
    """Return the numbers of rank 0, which alone has computed them."""
    given: list[Any] = [numbers]
    dist.broadcast_object_list(given, src=0)
    return [float(number) for number in given[0]]


def _norm(values: Any) -> float:
    return torch.nn.utils.get_total_norm(list(values)).item()


def _whole(shape: Shape) -> tuple[dict[str, torch.Tensor], Model]:
    """Return the parameters of the module and its loss, for one process."""
    module = shape.module()
    params = {name: value.detach() for name, value in module.named_parameters()}

    def loss(params: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return shape.loss(functional_call(module, params, (inputs,)), targets)

    return params, loss


# --- per-sample gradients -------------------------------------------------------------------------


def _sample_shape(place: Place) -> Shape:
    return _shape(place, context=32)


def _our_per_sample(place: Place) -> Turn:
    ours = _Ours(_sample_shape(place))
    part = _part(place, ours.shape)
    loss = lambda shards, sample: ours.loss(shards, sample[0][None], sample[1][None])  # noqa: E731
    evaluate = fs.per_sample_grad(loss, ours.plan, ours.mesh, max_norm=MAX_NORM)

    def turn() -> float:
        with place.timed(), sdpa_kernel(SDPBackend.MATH):
            _, grads = evaluate(ours.shards, part)
        return ours.norm(grads)

    return turn


def _their_per_sample(place: Place) -> Turn:
    """Clip the gradients of samples and average them, as the tutorial of ``torch.func`` has them."""
    shape = _sample_shape(place)
    params, loss = _whole(shape)
    inputs, targets = shape.batches(0)[0]
    each = vmap(grad(lambda params, x, y: loss(params, x[None], y[None])), (None, 0, 0))

    def run() -> list[torch.Tensor]:
        grads = each(params, inputs, targets)
        norms = torch.stack([value.flatten(1).norm(dim=1) for value in grads.values()]).norm(dim=0)
        factors = (MAX_NORM / norms).clamp(max=1.0) / SAMPLES
        return [torch.einsum("s,s...->...", factors, value) for value in grads.values()]

    def turn() -> float:
        result = _alone(place, run)
        return _from_rank_0(result and [_norm(result)])[0]

    return turn


# --- products with the Hessian --------------------------------------------------------------------


def _hvp_shape(place: Place) -> Shape:
    return _shape(place, context=32)


def _our_hvp(place: Place) -> Turn:
    ours = _Ours(_hvp_shape(place))
    part = _part(place, ours.shape)
    direction = fs.from_state_dict(_directions(fs.gather(ours.shards, ours.plan, ours.mesh)), ours.plan, ours.mesh)
    of_loss = grad(lambda shards: ours.loss(shards, *part) / place.size)

    def turn() -> float:
        with place.timed(), sdpa_kernel(SDPBackend.MATH):
            product = jvp(of_loss, (ours.shards,), (direction,))[1]
        return ours.norm(product)

    return turn


def _their_hvp(place: Place) -> Turn:
    shape = _hvp_shape(place)
    params, loss = _whole(shape)
    batch = shape.batches(0)[0]
    direction = _directions(params)

    def run() -> Any:
        return jvp(grad(lambda params: loss(params, *batch)), (params,), (direction,))[1]

    def turn() -> float:
        result = _alone(place, run)
        return _from_rank_0(result and [_norm(result.values())])[0]

    return turn


# --- an ensemble ----------------------------------------------------------------------------------


def _ensemble_shape(place: Place) -> Shape:
    return _shape(place, width=192, layers=6, heads=6, context=32)


def _our_ensemble(place: Place) -> Turn:
    ours = _Ours(_ensemble_shape(place))
    part = _part(place, ours.shape)
    scaled = [
        fs.shard({name: value * (1 + model / 8) for name, value in ours.params.items()}, ours.plan, ours.mesh)
        for model in range(MODELS)
    ]
    stack = {
        unit: {key: torch.stack([each[unit][key] for each in scaled]) for key in ours.shards[unit]} for unit in scaled[0]
    }
    losses_of = vmap(lambda shards: ours.loss(shards, *part))

    def loss_fn(stack: Any) -> tuple[torch.Tensor, torch.Tensor]:
        losses = losses_of(stack)
        return losses.sum(), losses.detach()

    evaluate = fs.value_and_grad(loss_fn, has_aux=True, mesh=ours.mesh)

    def turn() -> list[float]:
        with place.timed(), sdpa_kernel(SDPBackend.MATH):
            (_, losses), grads = evaluate(stack)
        of_all = fs.pmean(losses, ours.mesh).tolist()
        return [*of_all, ours.norm(grads)]

    return turn


def _their_ensemble(place: Place) -> Turn:
    shape = _ensemble_shape(place)
    loss = _whole(shape)[1]
    modules = [shape.module() for _ in range(MODELS)]
    for model, each in enumerate(modules):
        for p in each.parameters():
            p.data.mul_(1 + model / 8)
    stack, _ = stack_module_state(modules)
    inputs, targets = shape.batches(0)[0]
    losses_of = vmap(lambda params: loss(params, inputs, targets))

    def run() -> tuple[torch.Tensor, Any]:
        losses = losses_of(stack)
        return losses.detach(), torch.autograd.grad(losses.sum(), list(stack.values()))

    def turn() -> list[float]:
        result = _alone(place, run)
        return _from_rank_0(result and [*result[0].tolist(), _norm(result[1])])

    return turn


_PEER = "torch.func, whole, one process"
CASES = (
    Case("per_sample", "clipped gradients of 8 samples, GPT of 10.8 M", _PEER, 1.3, _our_per_sample, _their_per_sample),
    Case("hvp", "product with the Hessian, GPT of 10.8 M", _PEER, 1.3, _our_hvp, _their_hvp),
    Case("ensemble", "gradients of 8 models under vmap", _PEER, 1.3, _our_ensemble, _their_ensemble),
)
