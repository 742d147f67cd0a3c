"""``CASES``: the steps, options and programs that run dry, by name; ``QUICK``: those of the tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

import funcshard as fs
from benchmarks.dry import programs
from benchmarks.dry.steps import train

BFLOAT16 = fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FLOAT16 = fs.MixedPrecision(param_dtype=torch.float16)


def _adamw(**options: Any) -> Callable[[fs.Plan, fs.Mesh], Any]:
    return lambda plan, mesh: fs.torch_optimizer(torch.optim.AdamW, lr=1e-2, **options)


def _momentum(plan: fs.Plan, mesh: fs.Mesh) -> Any:
    return fs.torch_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)


def _capturable(plan: fs.Plan, mesh: fs.Mesh) -> Any:
    return fs.torch_optimizer(torch.optim.AdamW, lr=1e-2, capturable=mesh.device.type == "cuda")


def _grouped(plan: fs.Plan, mesh: fs.Mesh) -> Any:
    groups = [{"paths": ["**.bias"], "weight_decay": 0.0}]
    return fs.torch_optimizer(torch.optim.AdamW, lr=lambda step: 1e-2 / (1 + step), groups=groups, plan=plan, mesh=mesh)


def _torchopt(plan: fs.Plan, mesh: fs.Mesh) -> Any:
    import torchopt

    return torchopt.adam(1e-2)


def _muon(plan: fs.Plan, mesh: fs.Mesh) -> Any:
    return fs.muon(plan=plan, mesh=mesh, lr=1e-2)


def _per_matrix(plan: fs.Plan, mesh: fs.Mesh) -> Any:
    def update(grad: Any, left: Any) -> Any:
        return -1e-2 * left @ grad, left + grad @ grad.T

    return fs.per_matrix(lambda matrix: matrix @ matrix.T, update, plan, mesh, others=_adamw()(plan, mesh))


class Case(NamedTuple):
    """A program to run dry.

    Attributes:
        run: the program of one rank.
        shape: the ranks; the program is that of rank 0.
        records: whether it records programs.
    """

    run: Callable[[fs.Mesh], object]
    shape: Mapping[str, int]
    records: bool = False


ONE, TWO, HYBRID = {"shard": 1}, {"shard": 2}, {"replicate": 2, "shard": 2}
# One unit is offloaded, and the others are not.
PARTLY = {"units": {"embed": {}, "blocks.0": {"offload": True}, "blocks.1": {}}}


def _steps(shape: Mapping[str, int] = TWO, run: Callable[..., object] = train, **options: Any) -> Case:
    return Case(partial(run, **options), shape)


def _graph(change: Any = None, shape: Mapping[str, int] = TWO, **options: Any) -> Case:
    return Case(partial(programs.trace, change=change, **options), shape, records=True)


# The cases that the tests run.
QUICK: dict[str, Case] = {
    "one rank, float16": _steps(ONE, plan={"precision": FLOAT16}, scaler=fs.GradScaler(), max_norm=1.0),
    "full_shard": _steps(steps=2),
    "offload, clipped": _steps(plan={"offload": True}, max_norm=1.0),
    "bfloat16": _steps(plan={"precision": BFLOAT16}),
    "remat, dropout, groups": _steps(remat=("blocks.0", "blocks.1"), dropout=0.5, optimizer=_grouped),
    "weights, mutable, torchopt": _steps(weighted=True, mutable=True, optimizer=_torchopt),
    "evaluation": _steps(run=programs.evaluate),
    "composed by hand": _steps(run=programs.compose),
    "composed by hand, simulated": _steps(ONE, run=programs.simulated),
    "collectives": _steps(run=programs.collectives),
    "per-sample gradients": _steps(run=programs.per_sample),
    "checkpoint": _steps(ONE, run=programs.save_and_restore, plan=PARTLY),
    "safetensors": _steps(run=programs.as_safetensors),
    "model axes": _steps({"shard": 2, "tensor": 2}, run=programs.model_axes),
}

CASES: dict[str, Case] = {
    **QUICK,
    "no_shard, foreach": _steps(plan={"strategy": "no_shard"}, optimizer=_adamw(foreach=True)),
    "hybrid, shard_grad_op, fused": _steps(
        HYBRID, plan={"strategy": "shard_grad_op"}, max_norm=1.0, optimizer=_adamw(fused=True)
    ),
    "slices, capturable": _steps({"shard": 4}, plan={"reshard_after_forward": 2}, optimizer=_capturable),
    "offload, buckets, bfloat16": _steps(plan={"offload": True, "bucket_bytes": 1 << 12, "precision": BFLOAT16}),
    "micro-batches, once": _steps(accumulate=2, reduce="once", optimizer=_momentum),
    "muon": _steps(optimizer=_muon),
    "state dicts": _steps(run=programs.convert),
    "init": _steps(run=programs.initialise),
    "autocast, float16, remat": _steps(autocast="float16", remat=("blocks.0",), scaler=fs.GradScaler()),
    "graph": _graph(remat=("blocks.0", "blocks.1"), dropout=0.5, plan=PARTLY, max_norm=1.0),
    "one rank, offload": _steps(ONE, steps=2, plan={"offload": True}),
    "buckets, slices": _steps({"shard": 4}, steps=2, plan={"bucket_bytes": 1 << 12, "reshard_after_forward": 2}),
    "prefetch after backward": _steps(steps=2, schedule={"backward_prefetch": "post", "limit": 2}),
    "no prefetch": _steps(steps=2, schedule={"backward_prefetch": None, "forward_prefetch": False}),
    "offload, hybrid, fused": _steps(HYBRID, steps=2, plan={"offload": True}, optimizer=_adamw(fused=True)),
    "offload, float16, scaler": _steps(plan={"offload": True, "precision": FLOAT16}, scaler=fs.GradScaler(), max_norm=1.0),
    "offload, weights, muon": _steps(plan={"offload": True}, weighted=True, optimizer=_muon),
    "micro-batches, shard_each": _steps(HYBRID, accumulate=2, reduce="shard_each"),
    "mutable, not donated": _steps(steps=2, mutable=True, donate=False),
    "state dicts, hybrid, muon": _steps(HYBRID, run=programs.convert, optimizer=_muon),
    "state dicts, all forms, offload": _steps(run=programs.convert, forms=programs.FORMS, plan={"offload": True}),
    "frozen, offload": _steps(frozen=True, plan={"offload": True}),
    "tied": _steps(tied=True),
    "cut again": _steps(ONE, run=programs.cut_again, plan=PARTLY),
    "combinators": _steps(run=programs.combine),
    "evaluation, offload": _steps(run=programs.evaluate, plan={"offload": True}),
    "checkpoint, capturable": _steps(ONE, run=programs.save_and_restore, optimizer=_capturable, scaler=fs.GradScaler()),
    "checkpoint, mutable, torchopt": _steps(ONE, run=programs.save_and_restore, mutable=True, optimizer=_torchopt),
    "safetensors, offload": _steps(run=programs.as_safetensors, plan={"offload": True}),
    "graph, scaler, weights, mutable": _graph(scaler=fs.GradScaler(), weighted=True, mutable=True),
    "offload, per_matrix": _steps(plan={"offload": True}, optimizer=_per_matrix),
    "graph, per_matrix": _graph(optimizer=_per_matrix),
    "graph, hybrid, buckets, capturable": _graph(shape=HYBRID, plan={"bucket_bytes": 1 << 12}, optimizer=_capturable),
    "graph, passes": _graph(programs.passes),
    "graph, compiled": _graph(programs.compiled, autocast="bfloat16", accumulate=2, reduce="once"),
    "graph, compiled, fused": _graph(programs.compiled, optimizer=_adamw(fused=True), max_norm=1.0),
    "graph, loaded": _graph(programs.loaded),
}
