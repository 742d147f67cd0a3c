"""The helpers of a training step: clipping, Muon, and accumulation.

Both sides have the same gradients: random ones, for the rows that do not compute any. FSDP2's side
calls the functions of torch that its users call, in their fastest form: with ``foreach``, and with
the fused AdamW. Muon's rows use a small GPT: products in bfloat16 are slow on most CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import funcshard as fs
from benchmarks.life.case import Case, Place, Turn
from benchmarks.life.sides import Ours, Theirs, gpt

MICRO_BATCHES = 4
MAX_NORM = 1.0


def _our_clip(place: Place) -> Turn:
    ours = Ours(gpt(place, 24))
    first = ours.random_grads()

    def turn() -> list[float]:
        grads = fs.copy(first)
        with place.timed():
            clipped, norm = fs.clip_by_global_norm(grads, ours.plan, ours.mesh, MAX_NORM, donate=True)
        return [norm.item(), ours.sum(clipped)]

    return turn


def _their_clip(place: Place) -> Turn:
    theirs = Theirs(gpt(place, 24))

    def turn() -> list[float]:
        theirs.set_random_grads()
        with place.timed():
            norm: Any = torch.nn.utils.clip_grad_norm_(theirs.params, MAX_NORM, foreach=True)
            norm = norm.full_tensor()
        return [norm.item(), theirs.sum(p.grad for p in theirs.params)]

    return turn


_MUON = {"width": 128, "layers": 4, "heads": 2, "context": 4, "vocabulary": 64}


def _our_muon(place: Place) -> Turn:
    ours = Ours(gpt(place, batch=1, **_MUON))
    grads = ours.random_grads()
    optimizer = fs.muon(ours.plan, ours.mesh, matrices=["blocks.*"], adamw={"lr": 1e-3, "fused": True})
    first = ours.shards, optimizer.init(ours.shards)

    def turn() -> float:
        shards, state = fs.copy(first)
        with place.timed():
            shards, state = optimizer.step(grads, state, shards)
        return ours.sum(shards)

    return turn


def _their_muon(place: Place) -> Turn:
    theirs = Theirs(gpt(place, batch=1, **_MUON))
    theirs.set_random_grads()
    named = theirs.module.named_parameters()
    is_matrix = [p.ndim == 2 and name.startswith("blocks.") for name, p in named]
    matrices, others = ([p for p, it in zip(theirs.params, is_matrix, strict=True) if it == kind] for kind in (True, False))
    first = [p.detach().clone() for p in theirs.params]
    optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(others, lr=1e-3, fused=True)]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    def turn() -> float:
        with torch.no_grad():
            for p, value in zip(theirs.params, first, strict=True):
                p.copy_(value)
                for state in (state for optimizer in optimizers for state in optimizer.state.get(p, {}).values()):
                    state.zero_()
        with place.timed():
            step()
        return theirs.sum(theirs.params)

    step()  # makes the state
    return turn


def _our_accumulation(reduce: Any) -> Callable[[Place], Turn]:
    def make(place: Place) -> Turn:
        ours = Ours(gpt(place, 24, batch=MICRO_BATCHES))
        loss_fn = lambda shards, batch: ours.loss(shards, *batch)  # noqa: E731
        evaluate = fs.accumulate(loss_fn, MICRO_BATCHES, mesh=ours.mesh, reduce=reduce)
        batch = ours.shape.batches(place.rank)[0]

        def check(result: Any) -> list[float]:
            loss, grads = result
            return [loss.item(), fs.global_norm(grads, ours.plan, ours.mesh).item()]

        return place.turn(lambda: evaluate(ours.shards, batch), check)

    return make


def _their_accumulation(reduce: str) -> Callable[[Place], Turn]:
    def make(place: Place) -> Turn:
        theirs = Theirs(gpt(place, 24, batch=MICRO_BATCHES))
        inputs, targets = (part.chunk(MICRO_BATCHES) for part in theirs.shape.batches(place.rank)[0])

        def turn() -> list[float]:
            theirs.optimizer.zero_grad()
            total = torch.zeros(())
            with place.timed():
                for number in range(MICRO_BATCHES):
                    if reduce == "once":
                        theirs.module.set_requires_gradient_sync(number == MICRO_BATCHES - 1)
                    loss = theirs.shape.loss(theirs.module(inputs[number]), targets[number]) / MICRO_BATCHES
                    loss.backward()
                    total += loss.detach()
            norm: Any = torch.nn.utils.get_total_norm([p.grad for p in theirs.params])
            return [total.item(), norm.full_tensor().item()]

        return turn

    return make


_ACCUMULATED = f"gradient of {MICRO_BATCHES} micro-batches, reduced"
CASES = (
    Case("clip", "clip the gradient to a norm", "clip_grad_norm_ on FSDP2", 0.8, _our_clip, _their_clip),
    Case("muon", "a step of Muon and AdamW, small GPT", "the same on FSDP2", 0.8, _our_muon, _their_muon),
    Case(
        "accumulate_each", f"{_ACCUMULATED} each time", "FSDP2", 0.8,
        _our_accumulation("each"), _their_accumulation("each"), most_rounds=6,
    ),
    Case(
        "accumulate_once", f"{_ACCUMULATED} once", "FSDP2, set_requires_gradient_sync", 0.8,
        _our_accumulation("once"), _their_accumulation("once"), most_rounds=6,
    ),
)  # fmt: skip
