"""Host time and memory of one rank among many, without the others: ``python -m benchmarks.scale``.

The process group is torch's "fake" one, whose other ranks do not exist. So one process builds and
trains as one of 16,384 ranks, and sends the messages that a rank of a real job sends. Leaves are
tiny, so the times are those of the work for each unit and each collective, and not of data.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import funcshard as fs
from funcshard.comm import DONE, desync, process_groups

RANKS, UNITS = (8, 64, 512, 1024, 4096, 16384), (10, 100, 1000)
PHASES = ("init_mesh", "make_plan", "shard", "fully_shard", "first step", "step")
HEADER = ("units", "ranks", *(f"{phase}, ms" for phase in PHASES), "heap, KiB", "of it torch's", "plan, KiB",
          "messages of construction", "of a step", "bytes of them")  # fmt: skip


class Messages:
    """In place of ``torch.distributed`` in the desync detectors: counts what they send beside data.

    Attributes:
        sent: number of collectives that were passed tensors, and the bytes of these, outputs included.
    """

    def __init__(self) -> None:
        self.sent = (0, 0)

    def __getattr__(self, name: str) -> Any:
        real = getattr(dist, name)
        if name not in ("all_gather", "all_reduce", "broadcast"):
            return real

        def counted(*tensors: Any, **options: Any) -> Any:
            parts = [part for each in tensors for part in (each if isinstance(each, list) else [each])]
            self.sent = (self.sent[0] + 1, self.sent[1] + sum(part.nbytes for part in parts))
            return real(*tensors, **options)

        return counted


@contextmanager
def fake_job(ranks: int, rank: int = 1) -> Iterator[None]:
    """Make this process one rank of a job of ``ranks``, of which no other rank exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        # Why: those of torch's fake group copy the part of each rank, in a loop.
        with mock.patch.multiple(process_groups, gather_single=_gather, scatter_single=_scatter):
            yield
    finally:
        dist.destroy_process_group()


def _gather(out: torch.Tensor, shard: torch.Tensor, *, group: Any, async_op: bool) -> Any:
    out.view(-1, shard.numel()).copy_(shard.reshape(1, -1).expand(out.numel() // max(shard.numel(), 1), -1))
    return DONE


def _scatter(out: torch.Tensor, full: torch.Tensor, *, group: Any, async_op: bool) -> Any:
    out.view(-1).copy_(full.view(-1)[: out.numel()])
    return DONE


class Phases(dict[str, float]):
    """Seconds of processor time by phase."""

    def timed(self, phase: str, run: Callable[[], Any]) -> Any:
        """Call ``run``, note its time as that of ``phase``, and return its result."""
        begin = time.process_time()
        result = run()
        self[phase] = time.process_time() - begin
        return result


class Scale(NamedTuple):
    """The measurements of one rank.

    Attributes:
        seconds: processor time of each phase.
        heap: bytes of Python objects that are held after two steps.
        heap_torch: those of them that files of torch allocated.
        plan: ``plan.to_json()``.
        construction: number and bytes of the messages before the first step.
        step: those of the third step.
    """

    ranks: int
    units: int
    seconds: dict[str, float]
    heap: int
    heap_torch: int
    plan: str
    construction: Sequence[int]
    step: Sequence[int]

    def row(self) -> list[str]:
        """Return the cells of a row of the table."""
        times = [f"{1000 * self.seconds[phase]:.1f}" for phase in PHASES]
        memory = [f"{self.heap / 1024:,.0f}", f"{self.heap_torch / 1024:,.0f}"]
        messages = ["{}: {:,} B".format(*self.construction), f"{self.step[0]}", f"{self.step[1]:,}"]
        return [f"{self.units:,}", f"{self.ranks:,}", *times, *memory, f"{len(self.plan) / 1024:,.1f}", *messages]


def measure(ranks: int, units: int, *, trace_memory: bool = True) -> Scale:
    """Build and train a model of units with six elements each as one of ``ranks`` ranks, in this process.

    ``trace_memory`` measures the heap, which makes everything else slower.
    """
    seconds, messages = Phases(), Messages()
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(units)])
    apply, params, buffers = fs.make_functional(net)
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
    x = torch.ones(1, 2)
    with fake_job(ranks), mock.patch.object(desync, "dist", messages):
        gc.collect()
        if trace_memory:
            tracemalloc.start()
        mesh = seconds.timed("init_mesh", lambda: fs.init_mesh(device="cpu"))
        plan = seconds.timed("make_plan", lambda: fs.make_plan(params, mesh, units=["*"], bucket_bytes=0))
        shards = seconds.timed("shard", lambda: fs.shard(params, plan, mesh))
        sharded = seconds.timed("fully_shard", lambda: fs.fully_shard(apply, plan, mesh))
        step = fs.make_train_step(lambda shards, own, x: sharded(shards, own, x).square().mean(), optimizer, plan, mesh)
        state = step.init(shards, buffers)
        construction = messages.sent
        state, _ = seconds.timed("first step", lambda: step(state, x))
        state, _ = step(state, x)
        before = messages.sent
        state, _ = seconds.timed("step", lambda: step(state, x))
        own = [after - start for after, start in zip(messages.sent, before, strict=True)]
        gc.collect()
        heap = heap_torch = 0
        if trace_memory:
            snapshot = tracemalloc.take_snapshot()
            tracemalloc.stop()
            heap = sum(trace.size for trace in snapshot.traces)
            heap_torch = sum(trace.size for trace in snapshot.traces if "/torch/" in trace.traceback[0].filename)
        return Scale(
            ranks=ranks, units=units, seconds=seconds, heap=heap, heap_torch=heap_torch,
            plan=plan.to_json(), construction=list(construction), step=own,
        )  # fmt: skip


def main() -> None:
    """Print a table of the command line's numbers of ranks and units."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks (default %(default)s)")
    parser.add_argument("--units", type=int, nargs="+", default=UNITS, help="numbers of units (default %(default)s)")
    parser.add_argument("--one", action="store_true", help="measure the first numbers in this process, and print JSON")
    options = parser.parse_args()
    if options.one:
        memory = measure(options.ranks[0], options.units[0])
        times = measure(options.ranks[0], options.units[0], trace_memory=False)
        print(json.dumps(memory._replace(seconds=times.seconds)))
        return
    print("|", " | ".join(HEADER), "|\n|", " | ".join("---" for _ in HEADER), "|")
    for units in options.units:
        for ranks in options.ranks:
            command = [sys.executable, "-m", "benchmarks.scale", "--one", "--ranks", str(ranks), "--units", str(units)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print("|", " | ".join(Scale(*found).row()), "|", flush=True)


if __name__ == "__main__":
    main()
