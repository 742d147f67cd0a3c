"""The peak memory of steady training steps: forward, backward, clipping, AdamW.

Both sides take ``WARM`` steps, after which all memory that outlives a step is there, and the peak of
the steps after these counts, above the memory of the process before the model was made. It is what
the process has from the system while the C library returns freed memory at once, with shared memory
counted once for all ranks: tensors, and the buffers of every communication library alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.life.case import Case, Place, Turn
from benchmarks.life.models import build, by_fsdp2, sample

__all__ = ["CASES"]

MILLIONS, WARM, STEPS, MAX_NORM = 11, 3, 4, 1.0


def _turn(place: Place, make: Callable[[], Callable[[], Any]]) -> Turn:
    """Return a turn that makes a step, warms up, and measures the peak of ``STEPS`` more."""

    def turn() -> float:
        with place.timed():
            step = make()
            for _ in range(WARM):
                step()
            place.forget_peak()
            for _ in range(STEPS):
                loss = step()
        return float(loss)

    return turn


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _ours(strategy: Any) -> Callable[[Place], Turn]:
    def make_turn(place: Place) -> Turn:
        import funcshard as fs

        mesh, batch = fs.init_mesh(device="cpu"), sample(MILLIONS, place)

        def make() -> Callable[[], Any]:
            apply, params, buffers = fs.make_functional(build(MILLIONS, place))
            plan = fs.make_plan(params, mesh, units=["blocks.*"], strategy=strategy)
            sharded = fs.fully_shard(apply, plan, mesh)
            loss_fn: Any = lambda shards, buffers, batch: _loss(sharded(shards, buffers, batch[0]), batch[1])  # noqa: E731
            optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
            train_step = fs.make_train_step(loss_fn, optimizer, plan, mesh, max_norm=MAX_NORM)
            state = train_step.init(fs.shard(params, plan, mesh), buffers)

            def step() -> torch.Tensor:
                nonlocal state
                state, metrics = train_step(state, batch)
                return metrics["local_loss"]

            return step

        return _turn(place, make)

    return make_turn


def _theirs(reshards: bool) -> Callable[[Place], Turn]:
    def make_turn(place: Place) -> Turn:
        import torch.distributed.fsdp

        batch = sample(MILLIONS, place)

        def make() -> Callable[[], Any]:
            options = {} if reshards else {"reshard_after_forward": False}
            module = by_fsdp2(build(MILLIONS, place), place.size, **options)
            params = list(module.parameters())
            optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)

            def step() -> torch.Tensor:
                loss = _loss(module(batch[0]), batch[1])
                loss.backward()
                torch.nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=True)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                return loss.detach()

            return step

        return _turn(place, make)

    return make_turn


def _case(strategy: str, peer: str, goal: float, *, reshards: bool) -> Case:
    return Case(
        f"peak-{strategy.replace('_', '-')}",
        f"peak memory of a step, {strategy}: GPT, {MILLIONS} M",
        peer,
        goal,
        _ours(strategy),
        _theirs(reshards),
        measure="bytes",
    )


CASES = (
    _case("full_shard", "FSDP2", 0.97, reshards=True),
    _case("shard_grad_op", "FSDP2, not resharded", 0.85, reshards=False),
)
