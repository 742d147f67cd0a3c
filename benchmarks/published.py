"""Compare estimates with the memory and the throughput that others have published.

python -m benchmarks.published --markdown docs/dev/estimates.md

``published_rows.json`` holds the published facts, each with its source. A row whose configuration is
complete has a ``case``; any other says why it is ``left_out``. A row counts without tensor, pipeline,
context or expert parallelism. ``published_unseen.json`` holds the rows of a blind test, on which no
efficiency was fitted.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import funcshard as fs
from benchmarks import results
from benchmarks.results import markdown
from funcshard.demo import DECODERS, decoder
from funcshard.estimate import Hardware, Report, Runtime, load_hardware

START, END = "<!-- published -->", "<!-- end of published -->"
GIB = 2**30
HEADER = ["run", "GPU", "figure", "published", "estimated", "error", "row"]
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
        checkpoints: the activation checkpoints, see ``build``.
        loss: name of the loss, of ``LOSSES``.
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


# --- models, in plain torch on the meta device ----------------------------------------------------


def build(name: str, length: int, checkpoints: str, *, compiled: bool = False) -> nn.Module:
    """Return a decoder of ``length`` positions on the meta device, some of whose blocks are checkpointed.

    ``checkpoints`` are ``"none"``, ``"full"``, ``"selective op"`` or ``"selective layer"``.
    """
    with torch.device("meta"):
        model = decoder(name, context=length)
        for i, block in enumerate(model.blocks):
            if checkpoints in ("full", "selective op") or (checkpoints == "selective layer" and i % 2):
                model.blocks[i] = Checkpointed(block, selective=checkpoints == "selective op", compiled=compiled)
    return model


class Checkpointed(nn.Module):
    """A module whose backward computes its forward again, or most of it.

    Arguments:
        block: the module.
        selective: whether to keep attention and every second matrix product, as torchtitan does.
        compiled: whether the result of the last product is dropped, which only the output needs.
    """

    def __init__(self, block: nn.Module, *, selective: bool = False, compiled: bool = False) -> None:
        super().__init__()
        self.block, self.selective, self.compiled = block, selective, compiled

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        if not self.selective:
            return checkpoint(self.block, *args, use_reentrant=False)
        # Why one less: a compiled graph keeps a result only if backward reads it.
        products = sum(isinstance(module, nn.Linear) for module in self.block.modules()) - self.compiled
        contexts = functools.partial(_contexts, products)
        return checkpoint(self.block, *args, use_reentrant=False, context_fn=contexts)


def _contexts(products: int) -> Any:
    counts: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation is torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            number = counts[context.is_recompute]
            keep = number % 2 == 1 and number <= products
        else:
            keep = "scaled_dot_product" in operation.__name__
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


# --- losses ---------------------------------------------------------------------------------------


def _eager(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _low(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return _Held.apply(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits.detach())


def _chunked(logits: torch.Tensor, targets: torch.Tensor, chunks: int = 8) -> torch.Tensor:
    parts = zip(logits.chunk(chunks, 1), targets.chunk(chunks, 1), strict=True)
    return torch.stack([_Fused.apply(part.float(), target, True) for part, target in parts]).sum()


class _Held(torch.autograd.Function):
    """``_Held.apply(loss, tensor)``: the loss; the graph's first node holds the tensor."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.tensor = tensor  # unlike a saved tensor, an attribute lives as long as the graph
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class _Fused(torch.autograd.Function):
    """``_Fused.apply(logits, targets, in_place)``: the cross-entropy as two kernels."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, in_place: bool) -> torch.Tensor:
        ctx.in_place = in_place
        ctx.save_for_backward(logits, targets)
        return logits.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        logits, _ = ctx.saved_tensors
        return (logits.mul_(grad) if ctx.in_place else logits * grad), None, None


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "eager": _eager,  # logits cast to float32, operation by operation
    "low": _low,  # in the dtype of the logits, which a variable of the loop holds until the end
    "held": lambda logits, targets: _low(logits.float(), targets),  # in float32, and held too
    "chunked": _chunked,  # cast chunk by chunk, compiled: torchtune's ``CEWithChunkedOutputLoss``
    # In one kernel each way, as a compiler makes it.
    "compiled": lambda logits, targets: _Fused.apply(logits.float(), targets, False),
    # Its backward overwrites the logits: flash-attention's ``CrossEntropyLoss(inplace_backward=True)``,
    # which llm-foundry uses.
    "fused": lambda logits, targets: _Fused.apply(logits, targets, True),
}


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


# --- comparisons ----------------------------------------------------------------------------------


class Compared(NamedTuple):
    """A published figure, the band of its estimate, and whether the row is fitted on, known or unseen."""

    case: Case
    figure: str  # "GiB in use", "GiB reserved", "tokens/s" of a GPU, or "fits"
    published: float
    low: float
    high: float
    kind: str

    @property
    def error(self) -> float:
        """How far the band lies above the published figure, or below it, relative to the figure."""
        nearest = min(max(self.published, self.low), self.high)
        return nearest / self.published - 1

    def row(self) -> list[str]:
        """Return the cells of the table."""
        digits = 0 if self.figure == "tokens/s" else 1
        band = f"{self.low:.{digits}f}" + (f"–{self.high:.{digits}f}" if self.high > self.low else "")
        figures = [self.figure, f"{self.published:.{digits}f}", band, f"{100 * self.error:+.1f} %"]
        return [self.case.title, self.case.kind, *figures, self.kind]


def compare(case: Case, kind: str = "known") -> Iterator[Compared]:
    """Yield the comparisons of a case: memory in use, reserved memory, throughput."""
    if case.row.get("peak_gib"):
        report = report_of(case)
        figure = "GiB reserved" if "reserved" in case.row["memory_kind"] else "GiB in use"
        low, high = report.reserved if figure == "GiB reserved" else (report.peak, report.peak)
        yield Compared(case, figure, case.row["peak_gib"], low / GIB, high / GIB, kind)
    if case.row["tps_per_gpu"]:
        speed = tokens_per_second(case)
        yield Compared(case, "tokens/s", case.row["tps_per_gpu"], speed, speed, "fitted" if case.fitted else kind)


def page() -> str:
    """Return the table of all runs as Markdown, after medians of its parts."""
    compared = [each for case in cases() for each in compare(case)]
    compared += [each for case in cases(UNSEEN) for each in compare(case, "unseen")]
    parts: dict[tuple[str, ...], list[float]] = {}
    for each in compared:
        part = (each.case.kind, "tokens/s", each.kind) if each.figure == "tokens/s" else ("", "memory", each.kind)
        parts.setdefault(part, []).append(abs(each.error))
    medians = [
        [*part, str(len(errors)), f"{100 * statistics.median(errors):.1f} %", f"{100 * max(errors):.1f} %"]
        for part, errors in sorted(parts.items())
    ]
    reasons = Counter(row["left_out"] for row in rows() if "left_out" in row)
    return "\n\n".join([
        markdown(["GPU", "figure", "row", "rows", "median error", "worst"], medians),
        _outcomes(),
        markdown(HEADER, [each.row() for each in compared]),
        "Rows by the reason for which they aren't compared:",
        markdown(["reason", "rows"], [[why, str(count)] for why, count in reasons.most_common()]),
    ])  # fmt: skip


def _outcomes() -> str:
    """Return what is estimated of runs that are known to fit or not to fit."""
    known = [case for case in cases() if case.row.get("outcome")]
    fitting = {case: report_of(case).peak <= load_hardware(case.hardware).memory for case in known}
    wrong = [case.title for case in known if fitting[case] != (case.row["outcome"] == "fits")]
    words = f"{len(known) - len(wrong)} of {len(known)} runs that are known to fit, or not to fit, are estimated so"
    return f"{words}; not these: {'; '.join(wrong)}." if wrong else f"{words}."


def main() -> None:
    """Print the tables, and write them into a page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__.split("\n")[0])
    parser.add_argument("--markdown", type=Path, help="a page with markers for the tables")
    options = parser.parse_args()
    text = page()
    print(text)
    if options.markdown:
        results.put(options.markdown, START, END, f"\n{text}\n")


if __name__ == "__main__":
    main()
