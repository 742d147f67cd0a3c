"""Runs whose memory or throughput others have published, as cases that can be estimated.

``published_rows.json`` holds the published facts, each with its source. A row whose configuration is
complete has a ``case``; any other says why it is ``left_out``. A row counts without tensor, pipeline,
context or expert parallelism. ``published_unseen.json`` holds the rows of a blind test, on which no
efficiency was fitted.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import funcshard as fs
from benchmarks.published_models import LOSSES, build
from funcshard.demo import DECODERS
from funcshard.estimate import Hardware, Report, Runtime, load_hardware

ROWS = Path(__file__).with_name("published_rows.json")
UNSEEN = Path(__file__).with_name("published_unseen.json")
# The kinds of GPU, and the hardware descriptions with each.
KINDS = {
    "A100": ("a100-80gb-8x200gbps", "a100-80gb-8x250gbps", "a100-80gb-8x50gbps", "a100-40gb-8x200gbps"),
    "H100": ("h100-8x400gbps", "h100-8x100gbps"),
    "H100 HBM2e": ("h100-hbm2e-8x400gbps",),
}
# How fast Triton's attention is beside matrix products, fitted with the efficiencies of each kind.
ATTENTION = {"A100": 0.9, "H100": 0.7, "H100 HBM2e": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A published run that can be estimated.

    Attributes:
        model: name of the decoder.
        replicas, shards: numbers of groups of ranks that hold the model, and of ranks in each.
        batch, length: samples of a micro-batch on a rank, and tokens of each.
        checkpoints: the activation checkpoints, see ``published_models.build``.
        loss: name of the loss, of ``published_models.LOSSES``.
        reduce_dtype: dtype of reductions; ``None``: the whole model is in bfloat16.
        last_stays: whether the last block stays gathered after forward.
        peer: ``"fsdp1"``, ``"fsdp2"`` or ``"none"``.
        hardware, optimizer: their names.
        fitted: whether the efficiencies of its kind of GPU were fitted on it.
        loop_bytes, triton_flops: what llm-foundry's loop of 2023 does beside the model in one
            micro-batch: bytes of its two metrics, and the FLOPs of attention, which is a Triton kernel.
    """

    model: str
    replicas: int
    shards: int
    batch: int
    length: int
    checkpoints: str
    loss: str
    compiled: bool
    reduce_dtype: str | None
    strategy: str
    last_stays: bool
    peer: str
    micro_batches: int
    hardware: str
    optimizer: str
    fitted: bool = False
    loop_bytes: int = 0
    triton_flops: int = 0
    row: dict[str, Any] = field(compare=False)

    @property
    def title(self) -> str:
        """The words by which tables name the case."""
        ranks = f"{self.shards}" if self.replicas == 1 else f"{self.replicas} × {self.shards}"
        words = "1 rank" if ranks == "1" else f"{ranks} ranks"
        parts = [self.row["model"].partition("(")[0].strip(), words, f"{self.batch} × {self.length}", self.checkpoints]
        parts += ["compiled"] * self.compiled + ["loss in chunks"] * (self.loss == "chunked")
        parts += [self.peer.upper()] * (self.peer != "none")
        return ", ".join(parts)

    @property
    def kind(self) -> str:
        """The kind of GPU."""
        return next(kind for kind, names in KINDS.items() if self.hardware in names)


@functools.cache
def rows(path: Path = ROWS) -> list[dict[str, Any]]:
    """Return the published rows."""
    return json.loads(path.read_text(encoding="utf-8"))


@functools.cache
def cases(path: Path = ROWS) -> tuple[Case, ...]:
    """Return the cases of all rows that are complete."""
    return tuple(Case(row=row, **row["case"]) for row in rows(path) if "case" in row)


def fitted_rows(kind: str) -> tuple[list[Case], list[Case]]:
    """Return the cases with a throughput that a kind was fitted on, and the other ones of the kind."""
    fast = [case for case in cases() if case.kind == kind and case.row["tps_per_gpu"]]
    return [case for case in fast if case.fitted], [case for case in fast if not case.fitted]


# --- one estimate ---------------------------------------------------------------------------------


def report_of(case: Case, micro_batches: int = 1) -> Report:
    """Return the estimate of a case, with a number of micro-batches."""
    traced, plan = _traced(case)
    runtime = {"fsdp1": Runtime.fsdp1(), "fsdp2": Runtime.fsdp2(), "none": Runtime(sent_lives=False)}[case.peer]
    return fs.estimate(
        traced, plan, hardware=case.hardware, optimizer=case.optimizer, runtime=runtime, accumulate=micro_batches
    )


_PROFILES: dict[tuple[Any, ...], Any] = {}


@functools.cache
def _traced(case: Case) -> tuple[Any, fs.Plan]:
    """Return the profile and the plan of a case."""
    model = build(case.model, case.length, case.checkpoints, compiled=case.compiled)
    precision = None
    if case.reduce_dtype is None:
        model = model.to(torch.bfloat16)
    else:
        precision = fs.MixedPrecision(torch.bfloat16, getattr(torch, case.reduce_dtype))
    apply, params, buffers = fs.make_functional(model)
    # Why the module inside a checkpoint: FSDP gathers ahead also where a checkpoint is inside of a
    # unit. Here the runtime learns the order only of leaves that no such checkpoint hides.
    names = [f"blocks.{i}" for i in range(DECODERS[case.model].layers)]
    held = {".".join(name.split(".")[:2]) for name in params if ".block." in name}
    units: dict[Any, Any] = {f"{name}.block" if name in held else name: {} for name in names}
    if case.last_stays:
        units[list(units)[-1]] = {"reshard_after_forward": False}
    mesh = {"replicate": case.replicas, "shard": case.shards} if case.replicas > 1 else case.shards
    plan = fs.make_plan(params, mesh, units=units, strategy=case.strategy, precision=precision)
    key = (case.model, case.batch, case.length, case.checkpoints, case.loss, case.compiled, case.reduce_dtype)
    if key not in _PROFILES:
        tokens = torch.zeros(case.batch, case.length, dtype=torch.int64, device="meta")
        _PROFILES[key] = fs.profile(
            apply, params, buffers, tokens, loss=LOSSES[case.loss], targets=tokens, precision=plan,
            compiled=["blocks.*"] if case.compiled else [],
        )  # fmt: skip
    return _PROFILES[key], plan


def tokens_per_second(case: Case) -> float:
    """Return the tokens of one rank in one second.

    A case of many micro-batches is estimated with one and with two of them; each further one takes
    as long as the second.
    """
    first = report_of(case)
    seconds, tokens = first.step_time, first.tokens
    if case.micro_batches > 1:
        second = report_of(case, micro_batches=2)
        seconds += (case.micro_batches - 1) * (second.step_time - first.step_time)
        tokens *= case.micro_batches
    return tokens / (seconds + case.micro_batches * loop_seconds(case, load_hardware(case.hardware)))


def loop_seconds(case: Case, machine: Hardware) -> float:
    """Return the seconds that a loop takes for one micro-batch beside what the profile holds."""
    moving = case.loop_bytes / (machine.memory_bandwidth * machine.memory_efficiency)
    products = case.triton_flops / (machine.flops["bfloat16"] * machine.flops_efficiency)
    return moving + products * (1 / ATTENTION[case.kind] - 1)
