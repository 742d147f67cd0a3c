"""Fit the efficiencies of each kind of GPU to published throughput.

A kind has one share of its peak FLOP/s that matrix products reach, and one share of its memory
bandwidth that other kernels reach. A third number belongs to a kernel and not to the GPU: how fast
Triton's attention is beside matrix products; only llm-foundry's rows use it. All are fitted on ten
rows, those evenly spaced among all rows of the kind in the order of ``published_rows.json``. All
other rows of the kind test the fit. ``chance`` repeats that with ten rows chosen at random.
"""

from __future__ import annotations

import functools
import json
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import published_loops
from benchmarks.published_cases import Case, cases, program_of, report_of
from funcshard.estimate import Hardware, estimate, load_hardware

__all__ = ["KINDS", "Fit", "chance", "fit", "fitted_rows", "title", "write"]

# The kinds of GPU, and the hardware descriptions with each.
KINDS = {
    "A100": ("a100-80gb-8x200gbps", "a100-80gb-8x250gbps", "a100-80gb-8x50gbps", "a100-40gb-8x200gbps"),
    "H100": ("h100-8x400gbps", "h100-8x100gbps"),
    "H100 HBM2e": ("h100-hbm2e-8x400gbps",),
}
ROWS_FITTED = 10
_FOLDER = Path(estimate.__code__.co_filename).with_name("machine") / "descriptions"
_COMPUTING = torch.arange(30, 101, dtype=torch.float64) / 100
_MOVING = torch.arange(20, 101, 2, dtype=torch.float64) / 100
_ATTENTION = torch.arange(50, 101, 5, dtype=torch.float64) / 100


class Fit(NamedTuple):
    """The efficiencies of a kind, and how well the rows agree with them.

    Attributes:
        computing: share of the peak that matrix products reach.
        moving: share of the memory bandwidth that other kernels reach.
        attention: throughput of Triton's attention beside that of products; 1 if no row has it.
        errors: estimated over published throughput, less one, of all rows of the kind.
        fitted: positions of the rows that are fitted on.
    """

    computing: float
    moving: float
    attention: float
    errors: tuple[float, ...]
    fitted: frozenset[int]

    @property
    def rest(self) -> list[float]:
        """The sizes of the errors of all rows that are not fitted on."""
        return [abs(error) for i, error in enumerate(self.errors) if i not in self.fitted]


def rows_of(kind: str) -> list[Case]:
    """Return the cases of a kind that have a published throughput."""
    return [case for case in cases() if case.hardware in KINDS[kind] and case.row["tps_per_gpu"]]


def _evenly(count: int) -> list[int]:
    return sorted({round(i * (count - 1) / (ROWS_FITTED - 1)) for i in range(ROWS_FITTED)})


def fitted_rows(kind: str) -> tuple[list[Case], list[Case]]:
    """Return the cases that a kind is fitted on, and the other ones of the kind."""
    own = rows_of(kind)
    chosen = _evenly(len(own))
    return [own[i] for i in chosen], [case for i, case in enumerate(own) if i not in chosen]


def fit(kind: str) -> Fit:
    """Return the efficiencies of a kind, fitted on the ten rows of ``fitted_rows``."""
    return _fit(kind, _evenly(len(rows_of(kind))))


def chance(kind: str, choices: int = 300) -> list[Fit]:
    """Return fits on ten rows each, chosen at random, the same ones every time."""
    draw, count = random.Random(0), len(rows_of(kind))
    return [_fit(kind, sorted(draw.sample(range(count), ROWS_FITTED))) for _ in range(choices)]


def _fit(kind: str, chosen: Sequence[int]) -> Fit:
    """Return the fit on some rows.

    It minimises the sum of the squared logarithms of estimated over published throughput. The time
    in which a rank waits for communication stays that of the first estimate.
    """
    table = _logarithms(kind)
    best = int((table[list(chosen)] ** 2).sum(0).argmin())
    rest, moving = divmod(best, len(_MOVING))
    attention, computing = divmod(rest, len(_COMPUTING))
    if bool((table == table[:, -1:]).all()):  # no row has that kernel
        attention = len(_ATTENTION) - 1
    errors = torch.expm1(-table[:, attention, computing, moving]).tolist()
    return Fit(
        round(float(_COMPUTING[computing]), 2), round(float(_MOVING[moving]), 2), round(float(_ATTENTION[attention]), 2),
        tuple(errors), frozenset(chosen),
    )  # fmt: skip


@functools.cache
def _logarithms(kind: str) -> torch.Tensor:
    """Return log(estimated / published seconds) by row, attention, computing and moving."""
    computing, moving = _COMPUTING[:, None], _MOVING
    found = []
    for work in map(_work, rows_of(kind)):
        machine, bandwidth = work.hardware, work.hardware.memory_bandwidth * moving
        seconds = work.waits + work.kernels * machine.kernel_overhead + work.moved / bandwidth + 0 * computing
        for (dtype, flops, nbytes), count in work.counts.items():
            products = flops / (machine.flops[dtype] * computing) if flops else 0 * computing
            seconds = seconds + count * torch.maximum(products, nbytes / bandwidth)
        attention = work.attention / (machine.flops["bfloat16"] * computing)
        slower = (1 / _ATTENTION - 1)[:, None, None] * attention
        found.append(torch.log((seconds + slower) / work.published))
    return torch.stack(found)


class _Work(NamedTuple):
    """The computations of a case in one step: kernels by FLOPs and bytes, and seconds that stay."""

    hardware: Hardware
    counts: Counter[tuple[str, int, int]]
    kernels: int
    moved: int
    attention: int
    waits: float
    published: float


def _work(case: Case) -> _Work:
    machine = load_hardware(case.hardware)
    report = report_of(case)
    counts: Counter[tuple[str, int, int]] = Counter()
    kernels = 0
    for run in program_of(case):
        for work in run.work:
            counts[work.dtype, work.flops, work.bytes] += case.micro_batches
            kernels += work.kernels * case.micro_batches
    moved = sum(span.bytes for span in report.spans if span.what == "optimizer")
    moved += published_loops.metric_bytes(case) * case.micro_batches
    attention = published_loops.attention_flops(case) * case.micro_batches
    seconds = report.tokens * case.micro_batches / case.row["tps_per_gpu"]
    return _Work(machine, counts, kernels, moved, attention, report.exposed * case.micro_batches, seconds)


def write(kind: str, found: Fit) -> str:
    """Write the efficiencies into the descriptions of a kind; return them in words."""
    source = (
        f"fitted on {len(found.fitted)} published runs on {kind} GPUs by python -m benchmarks.published --fit "
        f"(docs/estimates.md)"
    )
    for name in KINDS[kind]:
        path = _FOLDER / f"{name}.json"
        data = json.loads(path.read_text(encoding="utf-8"))
        data["flops_efficiency"] = {"value": found.computing, "source": source}
        data["memory_efficiency"] = {"value": found.moving, "source": source}
        path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    data = json.loads(published_loops.SHARES.read_text(encoding="utf-8"))
    data["share"] |= dict.fromkeys(KINDS[kind], found.attention)
    published_loops.SHARES.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    error = statistics.median(abs(found.errors[i]) for i in found.fitted)
    return (
        f"{kind}: flops_efficiency {found.computing:.2f}, memory_efficiency {found.moving:.2f}, Triton's attention "
        f"{found.attention:.2f} of products, median error {100 * error:.1f} %"
    )


def title(case: Case) -> str:
    """Return the words by which tables name a case."""
    row: dict[str, Any] = case.row
    ranks = f"{case.shards}" if case.replicas == 1 else f"{case.replicas} × {case.shards}"
    words = "1 rank" if ranks == "1" else f"{ranks} ranks"
    parts = [row["model"].partition("(")[0].strip(), words, f"{case.batch} × {case.length}", case.checkpoints]
    parts += ["compiled"] * case.compiled + ["loss in chunks"] * (case.loss == "chunked")
    parts += [case.peer.upper()] * (case.peer != "none")
    return ", ".join(parts)
