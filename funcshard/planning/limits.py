"""How much of a GPU's memory a run may use, and how much it needs."""

from __future__ import annotations

from funcshard._utils import table
from funcshard._utils.options import check_bytes
from funcshard.estimate import Hardware, Report

LARGEST_BATCH = 64  # samples of a rank that the search for a batch tries
# Shares of the step time. Between the first two lie 238 of 243 published runs of decoders, in
# docs/dev/estimates.md; between the others the steps of one GPU there.
NARROW, WIDE = (0.85, 1.2), (0.7, 1.5)

_MARGIN = 3 * 2**30  # bytes of a GPU that CUDA, NCCL and cuBLAS may take


def least_reserved(report: Report) -> int:
    """Return the bytes that torch's allocator reserves at least."""
    return max(report.reserved[0], report.peak)


def usable_bytes(hardware: Hardware, budget: int | str | None) -> int:
    """Return the bytes that torch's allocator may reserve."""
    usual_limit = hardware.memory
    if hardware.device == "cuda":
        usual_limit -= _MARGIN
    if budget is None:
        return usual_limit
    budget_bytes = check_bytes("budget", budget, example="60GiB")
    if budget_bytes > hardware.memory:
        raise ValueError(
            f"budget must be at most the {table.size(hardware.memory)} of {hardware.name}; found "
            f"{table.size(budget_bytes)}: leave it out, and {table.size(usual_limit)} count"
        )
    return budget_bytes
