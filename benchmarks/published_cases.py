"""Runs whose memory or throughput others have published, as cases that can be estimated.

``published_rows.json`` holds the published facts, each with its source; ``published_unseen.json``
holds the rows of llm-foundry's tables that the first file lacks, for a blind test. A row counts if its
configuration is complete: model, ranks, batch, length, checkpoints and precision, without tensor,
pipeline, context or expert parallelism. ``configure`` turns a row into a ``Case`` or says what is
missing, and treats all rows of a kind alike.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import funcshard as fs
from benchmarks.published_loops import loop_seconds
from benchmarks.published_models import LOSSES, build
from funcshard.demo import DECODERS, DecoderConfig, decoder
from funcshard.demo.gpt import GPTConfig
from funcshard.estimate import Hardware, Report, Runtime, estimate, load_hardware, profile

__all__ = ["ROWS", "Case", "cases", "configure", "program_of", "report_of", "rows", "tokens_per_second", "unseen"]

ROWS = Path(__file__).with_name("published_rows.json")
UNSEEN = Path(__file__).with_name("published_unseen.json")
_IBM = "PyTorch/IBM blog: Maximizing training throughput"

# The hardware of each GPU as rows name it: how the name begins, and the description.
_GPUS = {
    "H100 SXM 96GB HBM2e": "h100-hbm2e-8x400gbps",
    "H100 95": "h100-hbm2e-8x400gbps",
    "h100_80gb": "h100-8x400gbps",
    "H100 80GB, 800Gb/s": "h100-8x100gbps",
    "a100_40gb, 1600Gb/s": "a100-40gb-8x200gbps",
    "a100_80gb, 1600Gb/s": "a100-80gb-8x200gbps",
    "A100 80GB, 400Gb/s": "a100-80gb-8x50gbps",
    "A100": "a100-80gb-8x200gbps",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A published run that can be estimated.

    Attributes:
        row: the published row.
        model: name of the decoder.
        replicas: number of groups of ranks that hold the model.
        shards: number of ranks that hold it together.
        batch: samples of a micro-batch on a rank.
        length: tokens of a sample.
        checkpoints: the activation checkpoints, one of ``CHECKPOINTS``.
        loss: name of the loss.
        compiled: whether blocks are compiled.
        reduce_dtype: dtype of reductions; ``None``: the whole model is in bfloat16.
        strategy: the plan's strategy.
        last_stays: whether the last block stays gathered after forward.
        peer: ``"fsdp1"``, ``"fsdp2"`` or ``"none"``.
        micro_batches: number of micro-batches.
        hardware: name of the description.
        optimizer: name of the optimizer.
    """

    row: dict[str, Any]
    model: str
    replicas: int
    shards: int
    batch: int
    length: int
    checkpoints: str
    loss: str
    compiled: bool
    reduce_dtype: torch.dtype | None
    strategy: str
    last_stays: bool
    peer: str
    micro_batches: int
    hardware: str
    optimizer: str


def configure(row: dict[str, Any]) -> Case | str:
    """Return the case of a row, or what keeps it from being one."""
    source, notes, ac = row["source"], row["notes"] or "", row["ac"] or ""
    if why := _incomplete(row):
        return why
    checkpoints = next((kind for kind in ("selective op", "selective layer", "full", "none") if ac.startswith(kind)), None)
    if checkpoints is None:
        return "the checkpoints are not stated"
    foundry, titan, tune = (name in source for name in ("llm-foundry", "torchtitan", "torchtune"))
    fms = "fms" in source or source.startswith(_IBM)
    pure = (row["dtype"] == "bf16" and foundry) or fms
    compiled = bool(row["compile"])
    chunked = tune and any(word in notes for word in ("chunked", "checkpointing"))
    old = titan and row["date"][:7] < "2024-07"  # the loop held the logits until June 2024, e29b6b4d4
    loss = (
        "fused" if foundry else "low" if fms else "chunked" if chunked else "held" if old
        else "compiled" if tune and compiled else "eager"
    )  # fmt: skip
    shards = _shards(row) or 1
    peer = "none" if shards == 1 else "fsdp1" if "FSDP1" in notes or fms else "fsdp2"
    accumulated = re.search(r"grad accum (\d+)", notes)
    return Case(
        row=row,
        model=_decoder(row) or "",
        replicas=row["n_gpus"] // shards,
        shards=shards,
        batch=row["batch_per_gpu"],
        length=row["seq_len"],
        checkpoints=checkpoints,
        loss=loss,
        compiled=compiled,
        reduce_dtype=None if tune else torch.bfloat16 if pure else torch.float32,
        strategy="shard_grad_op" if "SHARD_GRAD_OP" in notes else "full_shard",
        last_stays=titan and peer == "fsdp2",
        peer=peer,
        micro_batches=int(accumulated[1]) if accumulated else 1,
        hardware=next(name for begin, name in _GPUS.items() if row["gpu"].startswith(begin)),
        optimizer="adamw_single" if foundry else "adamw_fused" if tune or (titan and not old) else "adamw",
    )


def _incomplete(row: dict[str, Any]) -> str:
    """Return why a row cannot be estimated, or ``""``."""
    notes, dtype = row["notes"] or "", row["dtype"] or ""
    parallel = [name for name in ("tp", "pp", "cp", "ep") if (row.get(name) or 1) > 1]
    rules = {
        "another parallelism: " + ", ".join(parallel): bool(parallel),
        "theory, not a run": "theory" in (row.get("memory_kind") or "") or "estimate" in (row.get("memory_kind") or ""),
        "float8": "fp8" in dtype or "float8" in dtype or "MXFP8" in dtype,
        "adapters": "LoRA" in notes,
        "the model's configuration is not published": _decoder(row) is None,
        "the number of ranks is not stated": not row["n_gpus"],
        "the sharding is not stated": not _shards(row),
        "the batch or its length is not stated": not row["batch_per_gpu"] or not row["seq_len"] or "not packed" in notes,
        "an optimizer in backward, or offloaded activations": "optimizer in backward" in notes
        or "ffload" in notes
        or "8-bit" in notes,
    }
    return next((why for why, holds in rules.items() if holds), "")


def _decoder(row: dict[str, Any]) -> str | None:
    """Return the decoder whose number of parameters is that of the row."""
    name = re.sub(r"[^a-z0-9.]", "", row["model"].lower().partition("(")[0]).replace("3.1", "3")
    found = next((each for each in DECODERS if re.sub(r"[^a-z0-9.]", "", each) == name), None)
    if found is None:
        return None
    config = DECODERS[found]
    if isinstance(config, GPTConfig) and row["seq_len"]:
        config = dataclasses.replace(config, context=row["seq_len"])
    return found if row["params"] is None or row["params"] == _numel(config) else None


@functools.cache
def _numel(config: DecoderConfig | GPTConfig) -> int:
    """Return the number of parameters, counted on the first blocks, since all others are equal to the last of these."""
    experts = config.experts if isinstance(config, DecoderConfig) else None
    least = 1 + (experts.dense_layers if experts else 0)
    with torch.device("meta"):
        fewer, more = (
            sum(parameter.numel() for parameter in decoder(config, layers=layers).parameters())
            for layers in (least, least + 1)
        )
    return fewer + (config.layers - least) * (more - fewer)


def _shards(row: dict[str, Any]) -> int | None:
    """Return how many ranks hold the model together, as far as it is published."""
    if row["shard_degree"] or not row["source"].startswith(_IBM):
        return row["shard_degree"]
    # The post's table lacks it. The README of the same code has it beside the same figures, at
    # github.com/foundation-model-stack/fms-fsdp@5e522b4 of the same day.
    return 8 if "7B" in row["model"] else row["n_gpus"]


@functools.lru_cache(maxsize=1)
def rows(path: Path = ROWS) -> list[dict[str, Any]]:
    """Return the published rows."""
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


@functools.cache
def cases() -> tuple[Case, ...]:
    """Return the cases of all rows that are complete."""
    return tuple(case for case in map(configure, rows()) if isinstance(case, Case))


def unseen() -> list[Case]:
    """Return the cases of llm-foundry's other rows, on which nothing is fitted or chosen."""
    data = json.loads(UNSEEN.read_text(encoding="utf-8"))
    found = []
    for values in data["rows"]:
        row = dict(zip(data["columns"], values, strict=True))
        row |= {"shard_degree": row["n_gpus"], "source": data["source"], "memory_kind": None, "compile": False}
        case = configure(row)
        assert isinstance(case, Case), f"{row} is not complete: {case}"
        found.append(case)
    return found


# --- one estimate ---------------------------------------------------------------------------------


def report_of(case: Case, *, hardware: Hardware | None = None, micro_batches: int | None = None) -> Report:
    """Return the estimate of a case.

    Arguments:
        case: the case.
        hardware: the machine; by default that of the case.
        micro_batches: number of micro-batches; by default one.
    """
    found, plan = _traced(case)
    runtime = {"fsdp1": Runtime.fsdp1(), "fsdp2": Runtime.fsdp2(), "none": Runtime(sent_lives=False)}[case.peer]
    return estimate(
        found, plan, hardware=hardware or case.hardware, optimizer=case.optimizer, runtime=runtime,
        micro_batches=micro_batches or 1,
    )  # fmt: skip


def _traced(case: Case) -> tuple[Any, fs.Plan]:
    """Return the profile and the plan of a case; both are kept."""
    key = dataclasses.replace(case, row={}, hardware="", optimizer="", micro_batches=1)
    trace = dataclasses.replace(key, shards=0, replicas=0, strategy="", last_stays=False, peer="")
    text, whole = repr(trace), repr(key)
    if whole not in _PLANS:
        apply, params, buffers = _model(case)
        precision = None
        if case.reduce_dtype is not None:
            precision = fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=case.reduce_dtype)
        # Why the module inside a checkpoint: FSDP gathers ahead also where a checkpoint is inside of
        # a unit. Here the runtime learns the order only of leaves that no such checkpoint hides.
        held = {
            i for i in range(DECODERS[case.model].layers) if any(name.startswith(f"blocks.{i}.block.") for name in params)
        }
        units: dict[Any, Any] = {
            f"blocks.{i}.block" if i in held else f"blocks.{i}": {} for i in range(DECODERS[case.model].layers)
        }
        if case.last_stays:
            units[list(units)[-1]] = {"reshard_after_forward": False}
        mesh = {"replicate": case.replicas, "shard": case.shards} if case.replicas > 1 else case.shards
        plan = fs.make_plan(params, mesh, units=units, strategy=case.strategy, precision=precision)
        if text not in _PROFILES:
            tokens = torch.zeros(case.batch, case.length, dtype=torch.int64, device="meta")
            _PROFILES[text] = profile(
                apply,
                params,
                buffers,
                tokens,
                loss=LOSSES[case.loss],
                targets=tokens,
                precision=plan,
                compiled=["blocks.*"] if case.compiled else [],
            )
        _PLANS[whole] = plan
    return _PROFILES[text], _PLANS[whole]


_PROFILES: dict[str, Any] = {}
_PLANS: dict[str, fs.Plan] = {}


def _model(case: Case) -> Any:
    model = build(case.model, case.length, case.checkpoints, compiled=case.compiled)
    if case.reduce_dtype is None:
        model = model.to(torch.bfloat16)
    return fs.make_functional(model)


def tokens_per_second(case: Case, hardware: Hardware | None = None) -> float:
    """Return the tokens of one rank in one second.

    A case of many micro-batches is estimated with one and with two of them; each further one takes
    as long as the second.
    """
    first = report_of(case, hardware=hardware)
    seconds, tokens = first.step_time, first.tokens
    if case.micro_batches > 1:
        second = report_of(case, hardware=hardware, micro_batches=2)
        seconds += (case.micro_batches - 1) * (second.step_time - first.step_time)
        tokens *= case.micro_batches
    seconds += case.micro_batches * loop_seconds(case, hardware or load_hardware(case.hardware))
    return tokens / seconds


def program_of(case: Case) -> list[Any]:
    """Return what a case computes in one micro-batch, run by run."""
    found, plan = _traced(case)
    return [step for step in found.program(plan).steps if hasattr(step, "work")]
