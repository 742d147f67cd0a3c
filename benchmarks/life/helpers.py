"""The helpers of a training step: clipping, and Muon.

Both sides have the same random gradients. FSDP2's side calls the functions of torch that its users
call, in their fastest form: with ``foreach``, and with the fused AdamW. Muon's rows use a small
GPT: products in bfloat16 are slow on most CPUs.
"""

from __future__ import annotations

from typing import Any

import torch

import funcshard as fs
from benchmarks.life.case import Case, Place, Turn
from benchmarks.life.sides import Ours, Theirs, gpt

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


CASES = (
    Case("clip", "clip the gradient to a norm", "clip_grad_norm_ on FSDP2", 0.8, _our_clip, _their_clip),
    Case("muon", "a step of Muon and AdamW, small GPT", "the same on FSDP2", 0.8, _our_muon, _their_muon),
)
