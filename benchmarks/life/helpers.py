"""The helpers of a training step: clipping, loss scaling, averages, Muon, and accumulation.

Both sides have the same gradients: random ones, for the rows that do not compute any. FSDP2's side
calls the functions of torch that its users call, in their fastest form: with ``foreach``, and with
the fused AdamW. It averages lists of parameters, because ``AveragedModel`` cannot copy a module of
FSDP2. Muon's rows use a small GPT: products in bfloat16 are slow on most CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import distribute_tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

import funcshard as fs
from benchmarks.life.case import Case, Place, Turn
from benchmarks.peers import sharded_by_fsdp2
from benchmarks.shapes import SHAPES, Shape
from funcshard.demo.gpt import GPT, Block, GPTConfig

__all__ = ["CASES"]

MICRO_BATCHES = 4
MAX_NORM = 1.0
SCALE = 2.0**10
DECAY = 0.999


# --- the model and its gradients ------------------------------------------------------------------


def _shape(place: Place, name: str = "gpt") -> Shape:
    return SHAPES["tiny" if place.tiny else name]


def _muon_shape(place: Place) -> Shape:
    config = GPTConfig(width=8 if place.tiny else 128, layers=2 if place.tiny else 4, heads=2, context=4, vocabulary=64)
    return Shape("small GPT", lambda: GPT(config), Block, 1, config.context, config.vocabulary, config.heads)


def _random_grads(module: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(p.shape, generator=generator) / 100 for name, p in module.named_parameters()}


class _Ours:
    """The model, its shards and gradients, of funcshard's side."""

    def __init__(self, shape: Shape) -> None:
        module = shape.module()
        self.mesh = fs.init_mesh(device="cpu")
        self.apply, params, self.buffers = fs.make_functional(module)
        self.plan = fs.make_plan(params, self.mesh, units=fs.wrap.by_class(shape.unit)(module))
        self.shards = fs.shard(params, self.plan, self.mesh)
        self.grads = fs.from_state_dict(_random_grads(module), self.plan, self.mesh)

    def sum(self, shards: Any) -> float:
        """Return the sum of all elements of the whole tree."""
        own = sum(leaf.double().sum() for leaf in _leaves(shards))
        return _over_ranks(own)


class _Theirs:
    """The same of FSDP2's side."""

    def __init__(self, shape: Shape) -> None:
        module = shape.module()
        grads = _random_grads(module)
        self.module: Any = sharded_by_fsdp2(module, shape.unit)
        params: dict[str, Any] = dict(self.module.named_parameters())
        for name, p in params.items():
            p.grad = distribute_tensor(grads[name], p.device_mesh, p.placements)
        self.params = list(params.values())

    def sum(self, tensors: Iterable[Any]) -> float:
        return _over_ranks(sum(each.detach().to_local().double().sum() for each in tensors))


def _leaves(shards: Any) -> list[torch.Tensor]:
    return [leaf for unit in shards.values() for leaf in unit.values()]


def _over_ranks(own: Any) -> float:
    total = torch.as_tensor(own, dtype=torch.float64).clone()
    dist.all_reduce(total)
    return total.item()


# --- norm and clipping ----------------------------------------------------------------------------


def _our_norm(place: Place) -> Turn:
    ours = _Ours(_shape(place))

    def turn() -> float:
        with place.timed():
            return fs.global_norm(ours.grads, ours.plan, ours.mesh).item()

    return turn


def _their_norm(place: Place) -> Turn:
    theirs = _Theirs(_shape(place))

    def turn() -> float:
        with place.timed():
            norm: Any = torch.nn.utils.get_total_norm([p.grad for p in theirs.params], foreach=True)
            return norm.full_tensor().item()

    return turn


def _our_clip(place: Place) -> Turn:
    ours = _Ours(_shape(place))

    def turn() -> list[float]:
        grads = fs.copy(ours.grads)
        with place.timed():
            clipped, norm = fs.clip_by_global_norm(grads, ours.plan, ours.mesh, MAX_NORM, donate=True)
        return [norm.item(), ours.sum(clipped)]

    return turn


def _their_clip(place: Place) -> Turn:
    theirs = _Theirs(_shape(place))
    grads = [p.grad.clone() for p in theirs.params]

    def turn() -> list[float]:
        torch._foreach_copy_([p.grad.to_local() for p in theirs.params], [grad.to_local() for grad in grads])
        with place.timed():
            norm: Any = torch.nn.utils.clip_grad_norm_(theirs.params, MAX_NORM, foreach=True)
            norm = norm.full_tensor()
        return [norm.item(), theirs.sum(p.grad for p in theirs.params)]

    return turn


# --- loss scaling ---------------------------------------------------------------------------------


def _our_scaler(place: Place) -> Turn:
    ours = _Ours(_shape(place))
    scaler = fs.GradScaler(init_scale=SCALE)
    state = scaler.init(ours.mesh)

    def turn() -> list[float]:
        scaled = fs.copy(ours.grads)
        with place.timed():
            grads, found_inf = scaler.unscale(scaled, state, ours.mesh, donate=True)
            new = scaler.update(state, found_inf)
            found = float(found_inf)  # a step asks whether to run the optimizer
        return [found, new.scale.item(), ours.sum(grads)]

    return turn


def _their_scaler(place: Place) -> Turn:
    theirs = _Theirs(_shape(place))
    grads = [p.grad.clone() for p in theirs.params]
    optimizer = torch.optim.SGD(theirs.params, lr=1.0)

    def turn() -> list[float]:
        torch._foreach_copy_([p.grad.to_local() for p in theirs.params], [grad.to_local() for grad in grads])
        scaler: Any = ShardedGradScaler("cpu", init_scale=SCALE)
        scaler.scale(torch.zeros(()))  # makes the scaler's tensors
        with place.timed():
            scaler.unscale_(optimizer)
            found = sum(each.item() for each in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
            scaler.update()
        return [found, scaler.get_scale(), theirs.sum(p.grad for p in theirs.params)]

    return turn


# --- averaged parameters --------------------------------------------------------------------------


def _our_ema(place: Place) -> Turn:
    ours = _Ours(_shape(place))
    update = get_ema_multi_avg_fn(DECAY)

    def turn() -> float:
        average = fs.copy(ours.grads)
        with place.timed():
            update(_leaves(average), _leaves(ours.shards), None)
        return ours.sum(average)

    return turn


def _their_ema(place: Place) -> Turn:
    theirs = _Theirs(_shape(place))
    update = get_ema_multi_avg_fn(DECAY)

    def turn() -> float:
        average = [p.grad.clone() for p in theirs.params]
        with place.timed():
            update(average, [p.detach() for p in theirs.params], None)
        return theirs.sum(average)

    return turn


# --- Muon -----------------------------------------------------------------------------------------


def _our_muon(place: Place) -> Turn:
    ours = _Ours(_muon_shape(place))
    optimizer = fs.muon(ours.plan, ours.mesh, matrices=["blocks.*"], adamw={"lr": 1e-3, "fused": True})
    first = ours.shards, optimizer.init(ours.shards)

    def turn() -> float:
        shards, state = fs.copy(first)
        with place.timed():
            shards, state = optimizer.step(ours.grads, state, shards)
        return ours.sum(shards)

    return turn


def _muon_step(module: nn.Module) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a function that goes back to the first parameters and state, and the step."""
    params = dict(module.named_parameters())
    matrices = [p for name, p in params.items() if p.ndim == 2 and name.startswith("blocks.")]
    others = [p for p in params.values() if not any(p is each for each in matrices)]
    first = [p.detach().clone() for p in params.values()]
    optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(others, lr=1e-3, fused=True)]

    def reset() -> None:
        with torch.no_grad():
            for p, value in zip(params.values(), first, strict=True):
                p.copy_(value)
                for tensor in [state for optimizer in optimizers for state in optimizer.state.get(p, {}).values()]:
                    tensor.zero_()

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    step()  # makes the state
    return reset, step


def _fsdp2_muon(place: Place) -> Turn:
    theirs = _Theirs(_muon_shape(place))
    reset, step = _muon_step(theirs.module)

    def turn() -> float:
        reset()
        with place.timed():
            step()
        return theirs.sum(theirs.params)

    return turn


def _plain_muon(place: Place) -> Turn:
    module = _muon_shape(place).module()
    for name, grad in _random_grads(module).items():
        module.get_parameter(name).grad = grad
    reset, step = _muon_step(module)

    def turn() -> float:
        reset()
        with place.timed():
            step()
        return sum(p.detach().double().sum().item() for p in module.parameters())

    return turn


# --- accumulation ---------------------------------------------------------------------------------


def _micro_batches(place: Place, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of one sample a micro-batch."""
    inputs, targets = replace(shape, batch=MICRO_BATCHES).batches(place.rank)[0]
    return inputs, targets


def _our_accumulation(reduce: Any) -> Callable[[Place], Turn]:
    def make(place: Place) -> Turn:
        shape = _shape(place)
        ours = _Ours(shape)
        sharded = fs.fully_shard(ours.apply, ours.plan, ours.mesh)
        loss_fn = lambda shards, batch: shape.loss(sharded(shards, ours.buffers, batch[0]), batch[1])  # noqa: E731
        evaluate = fs.accumulate(loss_fn, MICRO_BATCHES, mesh=ours.mesh, reduce=reduce)
        batch = _micro_batches(place, shape)

        def turn() -> list[float]:
            with place.timed():
                loss, grads = evaluate(ours.shards, batch)
            return [loss.item(), fs.global_norm(grads, ours.plan, ours.mesh).item()]

        return turn

    return make


def _their_accumulation(reduce: str) -> Callable[[Place], Turn]:
    def make(place: Place) -> Turn:
        shape = _shape(place)
        theirs = _Theirs(shape)
        batch = _micro_batches(place, shape)
        micro_batches = list(zip(*(each.chunk(MICRO_BATCHES) for each in batch), strict=True))

        def turn() -> list[float]:
            for p in theirs.params:
                p.grad = None
            total = torch.zeros(())
            with place.timed():
                for number, (inputs, targets) in enumerate(micro_batches):
                    if reduce == "once":
                        theirs.module.set_requires_gradient_sync(number == MICRO_BATCHES - 1)
                    loss = shape.loss(theirs.module(inputs), targets) / MICRO_BATCHES
                    loss.backward()
                    total += loss.detach()
            norm: Any = torch.nn.utils.get_total_norm([p.grad for p in theirs.params])
            return [total.item(), norm.full_tensor().item()]

        return turn

    return make


CASES = (
    Case("norm", "global norm of the gradient, 24.5 M parameters", "get_total_norm on FSDP2", 0.8, _our_norm, _their_norm),
    Case("clip", "clip the gradient to a norm", "clip_grad_norm_ on FSDP2", 0.8, _our_clip, _their_clip),
    Case("scaler", "unscale, look for infinities, update", "ShardedGradScaler on FSDP2", 0.8, _our_scaler, _their_scaler),
    Case("ema", "update averaged parameters", "get_ema_multi_avg_fn on FSDP2", 0.8, _our_ema, _their_ema),
    Case("muon", "a step of Muon and AdamW, small GPT", "the same on FSDP2", 0.8, _our_muon, _fsdp2_muon),
    Case("muon_plain", "a step of Muon and AdamW, small GPT", "the same on whole tensors", 0.8, _our_muon, _plain_muon),
    *(
        Case(
            f"accumulate_{reduce}", f"gradient of {MICRO_BATCHES} micro-batches, reduced {words}", peer, 0.8,
            _our_accumulation(reduce), _their_accumulation(reduce), most_rounds=6,
        )
        for reduce, words, peer in (
            ("each", "each time", "FSDP2"),
            ("once", "once", "FSDP2, set_requires_gradient_sync"),
        )
    ),
)  # fmt: skip
