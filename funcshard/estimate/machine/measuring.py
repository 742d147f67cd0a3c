"""``measure``: the figures of one rank, while all ranks work at once.

Peaks are those of the fastest run, with operands in caches. Efficiencies come from a training step;
see ``reference``. A collective is measured after a sweep through memory that empties the caches.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from funcshard.comm import Group, Mesh
from funcshard.estimate.machine.reference import (
    CLOCK,
    Reference,
    rates_of,
    reference_step,
    times_of,
)
from funcshard.estimate.machine.timing import KINDS
from funcshard.plan import dtype_name

# m, k and n of products in float32.
PRODUCTS = ((512, 384, 1536), (512, 1536, 384), (512, 384, 8192), (384, 512, 1536))
SMALL = ((128, 384, 384),)  # for other dtypes, which many CPUs multiply a hundred times slower
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
KERNELS = 50  # small products in a row; forward and backward have a kernel for each
LEAVES = 8  # gradients that a reduction joins
TENSORS = (1 << 20, 1 << 22, 1 << 24)  # bytes of the tensors of an addition
PASSES = 5  # over all figures, seconds apart, so that a burst of other work spoils only one
ROUNDS = 3  # of each figure in a pass


def measure(
    mesh: Mesh, sizes: Sequence[int], seconds: float, reference: Reference, *, passes: int = PASSES
) -> dict[str, Any]:
    """Return this rank's figures by name. All ranks of the mesh call it together.

    Arguments:
        sizes: bytes of the collectives' whole buffers.
        seconds: time for each peak.
    """
    group = mesh.groups["shard"]
    # Why not always: ranks that share a core wait for each other, which is part of their step.
    clock = CLOCK if group.size <= cores() else time.perf_counter
    peak_runs: dict[Any, Callable[[], Any]] = {}
    flops_by_dtype: dict[str, int] = {}
    for dtype in DTYPES:
        name = dtype_name(dtype)
        product_shapes = PRODUCTS if dtype == torch.float32 else SMALL
        flops_by_dtype[name] = sum(2 * m * k * n for m, k, n in product_shapes)
        for m, k, n in product_shapes:
            peak_runs[name, m, k, n] = functools.partial(
                torch.matmul,
                torch.randn(m, k, dtype=torch.float32, device="cpu").to(dtype),
                torch.randn(k, n, dtype=torch.float32, device="cpu").to(dtype),
            )
    for size in TENSORS:
        peak_runs["add", size] = functools.partial(torch.add, _ones(size), _ones(size))
    peak_runs["copy"] = functools.partial(_ones(TENSORS[-1]).copy_, _ones(TENSORS[-1]))
    collectives = {(kind, size): _collective(group, kind, size) for kind in KINDS for size in sizes}
    swept_memory = _ones(2 * max(sizes))
    train_step, update_step, updated_bytes = reference_step(reference)
    best_seconds = dict.fromkeys(peak_runs, math.inf)
    link_seconds: dict[Any, list[float]] = {key: [] for key in collectives}
    run_counts: dict[Any, int] = {}
    kernel_seconds, train_seconds, kernel_runs, update_seconds = [], [], [], []
    train_step()
    update_step()  # the first update makes the optimizer's state
    for _ in range(passes):
        for key, run_once in peak_runs.items():
            # Note: ranks agree on the number of runs, because they time them together.
            run_counts[key] = run_counts.get(key) or _count(
                run_once, group, seconds / passes / ROUNDS
            )
            for _ in range(ROUNDS if run_counts[key] > 1 else 1):
                _together(group)
                # Note: other programs only add time, so the fastest run is the truest.
                best_seconds[key] = min(
                    best_seconds[key], _clock(run_once, times=run_counts[key], now=clock)
                )
        for _ in range(ROUNDS):
            kernel_seconds.append(_clock(_small_kernels, now=clock))
            for key, run_once in collectives.items():
                # Note: empties the caches, as the computations between two collectives of a step
                # do.
                swept_memory.add_(1)
                _together(group)
                link_seconds[key].append(_clock(run_once))
            _together(group)
            train_seconds.append(_clock(train_step, now=clock))
            update_seconds.append(_clock(update_step, now=clock))
            kernel_runs.append(times_of(train_step))
    kernel_overhead = min(kernel_seconds) / (2 * KERNELS)
    return {
        "collectives": link_seconds,
        "flops": {
            name: count / sum(taken for key, taken in best_seconds.items() if key[0] == name)
            for name, count in flops_by_dtype.items()
        },
        "memory_bandwidth": 3 * sum(TENSORS) / sum(best_seconds["add", size] for size in TENSORS),
        "copy": TENSORS[-1] / best_seconds["copy"],
        "kernel_overhead": kernel_overhead,
        "rates": tuple(rates_of(kernel_runs, statistics.median(train_seconds), kernel_overhead)),
        "update": updated_bytes / statistics.median(update_seconds),
    }


def _collective(group: Group, kind: str, size: int) -> Callable[[], Any]:
    """Return a function that runs one collective whose event has ``size`` bytes."""
    ranks, rank = group.size, group.rank
    whole_tensor = _ones(max(size // 4 // ranks, 1) * ranks * 4)
    shard = whole_tensor[: whole_tensor.numel() // ranks].clone()
    gradient_parts = [part_numel.clone() for part_numel in whole_tensor.tensor_split(LEAVES)]
    if kind == "all_gather":
        return lambda: group.all_gather_shared(shard).wait()
    # Note: a reduction also joins gradients and divides the sum, as in a training step.
    if kind == "reduce_scatter":
        return lambda: _reduce(group.reduce_scatter, ranks, torch.empty_like(shard), gradient_parts)
    if kind == "all_reduce":
        return lambda: _reduce(group.all_reduce, ranks, torch.cat(gradient_parts))
    if kind == "broadcast":
        return lambda: group.broadcast(whole_tensor, 0).wait()
    # Exchanges: a rank sends `size` bytes to others, in equal parts or all to the next rank.
    part_numel = size // 4
    taking_ranks, giving_ranks = [(rank + 1) % ranks], [(rank - 1) % ranks]
    if kind == "all_to_all":
        part_numel //= ranks - 1
        taking_ranks = giving_ranks = [other for other in range(ranks) if other != rank]
    sent_sizes = [part_numel * (other in taking_ranks) for other in range(ranks)]
    received_sizes = [part_numel * (other in giving_ranks) for other in range(ranks)]
    sent_data = _ones(sum(sent_sizes) * 4)
    return lambda: group.all_to_all(
        torch.empty(sum(received_sizes), dtype=torch.float32, device="cpu"),
        sent_data,
        received_sizes,
        sent_sizes,
    ).wait()


def _reduce(start: Callable[..., Any], ranks: int, out: torch.Tensor, *grads: Any) -> None:
    start(out, *grads).wait()
    out.div_(ranks)


def _ones(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes // 4, dtype=torch.float32, device="cpu")


def _together(group: Group) -> None:
    group.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu")).wait()


def _count(run: Callable[[], Any], group: Group, seconds: float) -> int:
    """Return how many runs fill ``seconds``, the same number on all ranks."""
    run()  # the first run allocates
    once_seconds = torch.tensor([_clock(run)], device="cpu")
    group.all_reduce(once_seconds).wait()
    return max(1, min(1000, int(seconds / max(float(once_seconds) / group.size, 1e-6))))


def _clock(
    run: Callable[[], Any], *, times: int = 1, now: Callable[[], float] = time.perf_counter
) -> float:
    """Return the mean seconds of a ``run``."""
    start = now()
    for _ in range(times):
        run()
    return (now() - start) / times


def _small_kernels() -> None:
    x = y = torch.ones(16, requires_grad=True, dtype=torch.float32, device="cpu")
    for _ in range(KERNELS):
        y = y * 1.0
    torch.autograd.grad(y.sum(), x)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
