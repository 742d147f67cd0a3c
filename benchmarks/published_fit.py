"""Fit the two efficiencies of each kind of GPU to published throughput.

A kind has one share of its peak FLOP/s that matrix products reach, and one share of its memory
bandwidth that other kernels reach. Both are fitted on ten rows, those evenly spaced among all rows
of the kind in the order of ``published_rows.json``. All other rows of the kind test the fit.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.published import Case, cases, program_of, report_of
from funcshard.estimate import Hardware, estimate, load_hardware

__all__ = ["KINDS", "fit", "fitted_rows", "title", "write"]

# The kinds of GPU, and the hardware descriptions with each.
KINDS = {
    "A100": ("a100-80gb-8x200gbps", "a100-80gb-8x250gbps", "a100-80gb-8x50gbps", "a100-40gb-8x200gbps"),
    "H100": ("h100-8x400gbps", "h100-8x100gbps"),
    "H100 HBM2e": ("h100-hbm2e-8x400gbps",),
}
ROWS_FITTED = 10
_FOLDER = Path(estimate.__code__.co_filename).with_name("machine") / "descriptions"


def fitted_rows(kind: str) -> tuple[list[Case], list[Case]]:
    """Return the cases that a kind is fitted on, and the other ones of the kind."""
    own = [case for case in cases() if case.hardware in KINDS[kind] and case.row["tps_per_gpu"]]
    chosen = {round(i * (len(own) - 1) / (ROWS_FITTED - 1)) for i in range(ROWS_FITTED)}
    return [own[i] for i in sorted(chosen)], [case for i, case in enumerate(own) if i not in chosen]


def fit(kind: str) -> tuple[float, float, float]:
    """Return the two efficiencies of a kind, and the median relative error on the fitted rows.

    The search minimises the sum of the squared logarithms of estimated over published throughput.
    The time in which a rank waits for communication stays that of the first estimate.
    """
    works = [_work(case) for case in fitted_rows(kind)[0]]
    best = (math.inf, 0.0, 0.0)
    for computing in range(30, 101):
        for moving in range(20, 101, 2):
            errors = [_error(work, computing / 100, moving / 100) for work in works]
            best = min(best, (sum(each**2 for each in errors), computing / 100, moving / 100))
    _, computing_share, moving_share = best
    errors = [abs(math.expm1(_error(work, computing_share, moving_share))) for work in works]
    return computing_share, moving_share, statistics.median(errors)


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """The computations of a case in one step: kernels by FLOPs and bytes, and seconds that stay."""

    hardware: Hardware
    counts: Counter[tuple[str, int, int]]
    kernels: int
    moved: int
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
    seconds = report.tokens * case.micro_batches / case.row["tps_per_gpu"]
    return _Work(machine, counts, kernels, moved, report.exposed * case.micro_batches, seconds)


def _error(work: _Work, computing: float, moving: float) -> float:
    """Return the logarithm of estimated over published seconds."""
    machine, bandwidth = work.hardware, work.hardware.memory_bandwidth * moving
    seconds = work.waits + work.kernels * machine.kernel_overhead + work.moved / bandwidth
    for (dtype, flops, nbytes), count in work.counts.items():
        peak = machine.flops[dtype] * computing if flops else 1.0
        seconds += count * max(flops / peak, nbytes / bandwidth)
    return math.log(seconds / work.published)


def write(kind: str, computing: float, moving: float) -> None:
    """Write the two efficiencies into the descriptions of a kind."""
    rows = fitted_rows(kind)[0]
    runs = f"{len(rows)} published runs on {kind} GPUs"
    source = f"fitted on {runs} by python -m benchmarks.published --fit (docs/estimates.md)"
    for name in KINDS[kind]:
        path = _FOLDER / f"{name}.json"
        data = json.loads(path.read_text(encoding="utf-8"))
        data["flops_efficiency"] = {"value": computing, "source": source}
        data["memory_efficiency"] = {"value": moving, "source": source}
        path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def title(case: Case) -> str:
    """Return the words by which tables name a case."""
    row: dict[str, Any] = case.row
    ranks = f"{case.shards}" if case.replicas == 1 else f"{case.replicas} × {case.shards}"
    words = "1 rank" if ranks == "1" else f"{ranks} ranks"
    parts = [row["model"].partition("(")[0].strip(), words, f"{case.batch} × {case.length}", case.checkpoints]
    parts += ["compiled"] * case.compiled + ["loss in chunks"] * (case.loss == "chunked")
    parts += [case.peer.upper()] * (case.peer != "none")
    return ", ".join(parts)
