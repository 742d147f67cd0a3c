"""Measure all-gather and reduce-scatter: gloo's, funcshard's over gloo, and in shared memory.

    python -m benchmarks.collectives

The tables show processor time, summed over all threads of a rank, because a computation on the same
cores loses that time.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.show import show
from funcshard.comm.torch_group import TorchGroup

__all__ = ["tables"]

# torch 2.13 renames these two functions.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SIZES = (1 << 10, 1 << 16, 1 << 20, 7 << 20)  # bytes of the whole buffer; the last is that of a unit of the demo's GPT
IN_A_ROW = 10  # collectives between two barriers, so that the barriers weigh little
WAYS = ("gloo's own", "funcshard on gloo", "funcshard in shared memory")


def tables(ranks: int, rounds: int, sizes: tuple[int, ...] = SIZES) -> list[dict[str, Any]]:
    """Measure the collectives and return one table for each kind."""
    context = multiprocessing.get_context("forkserver")  # ranks are forked from a process that has imported torch
    context.set_forkserver_preload(["benchmarks.collectives"])
    with tempfile.TemporaryDirectory(prefix="race-") as directory, context.Pool(ranks) as pool:
        jobs = [(rank, ranks, directory, rounds, sizes) for rank in range(ranks)]
        found = pool.starmap(_measure, jobs, chunksize=1)
    made = []
    for kind in ("all_gather", "reduce_scatter"):
        rows = []
        for size in sizes:
            cells = [statistics.mean(each[kind, size, way] for each in found) for way in WAYS]
            rows.append([_bytes(size), *(f"{1e3 * seconds:.2f}" for seconds in cells), f"{cells[-1] / cells[0]:.2f}"])
        title = f"{kind}: ms of processor time a rank; {ranks} ranks, one thread each, {rounds} × {IN_A_ROW} times"
        made.append({"title": title, "header": ["whole buffer", *WAYS, "last ÷ first"], "rows": rows})
    return made


def _measure(
    rank: int, ranks: int, directory: str, rounds: int, sizes: tuple[int, ...]
) -> dict[tuple[str, int, str], float]:
    """Return the median seconds of processor time by kind, size and way; the ways take turns."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(Path(directory) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=300))
    runs: dict[tuple[str, str], Callable[[torch.Tensor, torch.Tensor], Any]] = {
        ("all_gather", WAYS[0]): lambda full, shard: _gather(torch.empty_like(full), shard),
        ("reduce_scatter", WAYS[0]): lambda full, shard: _scatter(torch.empty_like(shard), full.clone()),
    }
    for way in WAYS[1:]:
        group = TorchGroup.of(dist.group.WORLD, shared_memory=way == WAYS[2])
        runs["all_gather", way] = functools.partial(_gathered, group)
        runs["reduce_scatter", way] = functools.partial(_reduced, group)
    found: dict[tuple[str, int, str], float] = {}
    for size in sizes:
        shard = torch.ones(size // 4 // ranks)
        full = shard.repeat(ranks)
        taken: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
        for _ in range(rounds):
            for key, run in runs.items():
                dist.barrier()
                start = time.process_time()
                for _ in range(IN_A_ROW):
                    run(full, shard)
                taken[key].append((time.process_time() - start) / IN_A_ROW)
        found |= {(kind, size, way): statistics.median(times) for (kind, way), times in taken.items()}
    dist.destroy_process_group()
    return found


def _gathered(group: TorchGroup, full: torch.Tensor, shard: torch.Tensor) -> None:
    group.all_gather_shared(shard).wait()


def _reduced(group: TorchGroup, full: torch.Tensor, shard: torch.Tensor) -> None:
    group.reduce_scatter(torch.empty_like(shard), full.chunk(2)).wait()


def _bytes(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def main() -> None:
    """Read the command line, measure, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=10, help="times each is measured")
    options = parser.parse_args()
    for ranks in options.ranks:
        for table in tables(ranks, options.rounds):
            show(**table)


if __name__ == "__main__":
    main()
