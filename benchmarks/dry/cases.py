"""``CASES``: the steps, options and programs that run dry, by name; ``QUICK``: those of the tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import funcshard as fs
from benchmarks.dry.graphs import change, compiled, draw_again, load, trace
from benchmarks.dry.programs import (
    FORMS,
    average,
    collectives,
    combine,
    compose,
    convert,
    evaluate,
    initialise,
    measure,
    model_axes,
    per_sample,
    simulated,
    to_host,
)  # fmt: skip
from benchmarks.dry.saving import as_safetensors, cut_again, save_and_restore
from benchmarks.dry.steps import train

__all__ = ["CASES", "QUICK", "Case"]

ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD
BFLOAT16 = fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FLOAT16 = fs.MixedPrecision(param_dtype=torch.float16)


def _optimizer(cls: Any, **options: Any) -> Callable[[fs.Plan, fs.Mesh], Any]:
    return lambda plan, mesh: fs.torch_optimizer(cls, **options)


def _capturable(plan: fs.Plan, mesh: fs.Mesh) -> Any:
    return fs.torch_optimizer(ADAMW, lr=1e-2, capturable=mesh.device.type == "cuda")


def _grouped(plan: fs.Plan, mesh: fs.Mesh) -> Any:
    groups = [{"paths": ["**.bias"], "weight_decay": 0.0}]
    return fs.torch_optimizer(ADAMW, lr=lambda step: 1e-2 / (1 + step), groups=groups, plan=plan, mesh=mesh)


def _torchopt(plan: fs.Plan, mesh: fs.Mesh) -> Any:
    import torchopt

    return torchopt.adam(1e-2)


@dataclass(frozen=True, slots=True)
class Case:
    """A program to run dry.

    Attributes:
        run: the program of one rank.
        shape: the ranks; the program is that of rank 0.
        records: whether it records graphs.
    """

    run: Callable[[fs.Mesh], object]
    shape: Mapping[str, int]
    records: bool = False


ONE, TWO, HYBRID = {"shard": 1}, {"shard": 2}, {"replicate": 2, "shard": 2}
MODEL = {"shard": 2, "tensor": 2}
# One unit is offloaded, and the others are not.
PARTLY = {"units": {"embed": {}, "blocks.0": {"offload": True}, "blocks.1": {}}}


def _steps(shape: Mapping[str, int] = TWO, run: Callable[..., object] = train, **options: Any) -> Case:
    return Case(lambda mesh: run(mesh, **options), shape)


def _graphs(run: Callable[..., object], shape: Mapping[str, int] = TWO, **options: Any) -> Case:
    return Case(lambda mesh: run(mesh, **options), shape, records=True)


def _muon(plan: fs.Plan, mesh: fs.Mesh) -> Any:
    return fs.muon(plan=plan, mesh=mesh, lr=1e-2)


# The cases that the tests run.
QUICK: dict[str, Case] = {
    "one rank, float16": _steps(ONE, plan={"precision": FLOAT16}, scaler=fs.GradScaler(), max_norm=1.0),
    "full_shard": _steps(steps=2),
    "no_shard, foreach": _steps(plan={"strategy": "no_shard"}, optimizer=_optimizer(ADAMW, lr=1e-2, foreach=True)),
    "hybrid, shard_grad_op, fused": _steps(
        HYBRID, plan={"strategy": "shard_grad_op"}, max_norm=1.0, optimizer=_optimizer(ADAMW, lr=1e-2, fused=True)
    ),
    "slices, capturable": _steps({"shard": 4}, plan={"reshard_after_forward": 2}, optimizer=_capturable),
    "offload, clipped": _steps(plan={"offload": True}, max_norm=1.0),
    "offload, buckets, bfloat16": _steps(plan={"offload": True, "bucket_bytes": 1 << 12, "precision": BFLOAT16}),
    "bfloat16": _steps(plan={"precision": BFLOAT16}),
    "micro-batches, once": _steps(accumulate=2, reduce="once", optimizer=_optimizer(SGD, lr=0.1, momentum=0.9)),
    "remat, dropout, groups": _steps(remat=("blocks.0", "blocks.1"), dropout=0.5, optimizer=_grouped),
    "weights, mutable, torchopt": _steps(weighted=True, mutable=True, optimizer=_torchopt),
    "muon": _steps(optimizer=_muon),
    "state dicts": _steps(run=convert),
    "init": _steps(run=initialise),
    "evaluation": _steps(run=evaluate),
    "composed by hand": _steps(run=compose),
    "composed by hand, simulated": _steps(ONE, run=simulated),
    "collectives": _steps(run=collectives),
    "per-sample gradients": _steps(run=per_sample),
    "autocast, float16, remat": _steps(autocast="float16", remat=("blocks.0",), scaler=fs.GradScaler()),
    "checkpoint": _steps(ONE, run=save_and_restore, plan=PARTLY),
    "safetensors": _steps(run=as_safetensors),
    "model axes": _steps(MODEL, run=model_axes),
    "graph": _graphs(draw_again, plan=PARTLY, max_norm=1.0),
}

CASES: dict[str, Case] = {
    **QUICK,
    "one rank": _steps(ONE, steps=2),
    "one rank, offload": _steps(ONE, steps=2, plan={"offload": True}),
    "shard_grad_op": _steps(steps=2, plan={"strategy": "shard_grad_op"}),
    "no_shard": _steps(steps=2, plan={"strategy": "no_shard"}),
    "hybrid": _steps(HYBRID, steps=2),
    "buckets": _steps(steps=2, plan={"bucket_bytes": 1 << 12}),
    "buckets, slices": _steps({"shard": 4}, steps=2, plan={"bucket_bytes": 1 << 12, "reshard_after_forward": 2}),
    "prefetch after backward": _steps(steps=2, schedule={"backward_prefetch": "post", "limit": 2}),
    "no prefetch": _steps(steps=2, schedule={"backward_prefetch": None, "forward_prefetch": False}),
    "offload, hybrid": _steps(HYBRID, steps=2, plan={"offload": True}),
    "offload, float16, scaler": _steps(plan={"offload": True, "precision": FLOAT16}, scaler=fs.GradScaler(), max_norm=1.0),
    "offload, weights": _steps(plan={"offload": True}, weighted=True),
    "offload, muon": _steps(plan={"offload": True}, optimizer=_muon),
    "offload, fused": _steps(plan={"offload": True}, optimizer=_optimizer(ADAMW, lr=1e-2, fused=True)),
    "float16, scaler": _steps(steps=2, plan={"precision": FLOAT16}, scaler=fs.GradScaler()),
    "micro-batches": _steps(steps=2, accumulate=2),
    "micro-batches, shard_each": _steps(HYBRID, accumulate=2, reduce="shard_each"),
    "mutable": _steps(steps=2, mutable=True),
    "weights": _steps(steps=2, weighted=True),
    "not donated": _steps(steps=2, donate=False),
    "state dicts, offload": _steps(run=convert, plan={"offload": True}),
    "state dicts, hybrid, muon": _steps(HYBRID, run=convert, optimizer=_muon),
    "state dict on the CPU": _steps(run=to_host),
    "autocast": _steps(autocast="bfloat16"),
    "state dicts, all forms": _steps(run=convert, forms=FORMS),
    "frozen": _steps(frozen=True),
    "frozen, offload": _steps(frozen=True, plan={"offload": True}),
    "tied": _steps(tied=True),
    "average": _steps(ONE, run=average, plan=PARTLY),
    "cut again": _steps(ONE, run=cut_again, plan=PARTLY),
    "average, two ranks": _steps(run=average),
    "combinators": _steps(run=combine),
    "combinators, offload": _steps(run=combine, plan={"offload": True}),
    "evaluation, offload": _steps(run=evaluate, plan={"offload": True}),
    "measured": _steps(run=measure),
    "checkpoint, capturable, scaler": _steps(ONE, run=save_and_restore, optimizer=_capturable, scaler=fs.GradScaler()),
    "checkpoint, mutable, torchopt": _steps(ONE, run=save_and_restore, mutable=True, optimizer=_torchopt),
    "checkpoint, offload": _steps(ONE, run=save_and_restore, plan={"offload": True}),
    "safetensors, offload": _steps(run=as_safetensors, plan={"offload": True}),
    "graph, partly offloaded": _graphs(trace, plan=PARTLY, max_norm=1.0),
    "graph, drawn again, compiled": _graphs(draw_again, compiles=True, plan=PARTLY),
    "graph, scaler, weights, mutable": _graphs(trace, scaler=fs.GradScaler(), weighted=True, mutable=True),
    "graph, muon": _graphs(trace, optimizer=_muon),
    "graph, hybrid, buckets": _graphs(trace, HYBRID, plan={"bucket_bytes": 1 << 12}),
    "graph, capturable": _graphs(trace, optimizer=_capturable),
    "graph, passes": _graphs(change),
    "graph, compiled": _graphs(compiled, autocast="bfloat16", accumulate=2, reduce="once"),
    "graph, compiled, fused": _graphs(compiled, optimizer=_optimizer(ADAMW, lr=1e-2, fused=True), max_norm=1.0),
    "graph, loaded": _graphs(load),
}
