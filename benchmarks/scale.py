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
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import funcshard as fs
from benchmarks.phases import Phases
from funcshard.comm import DONE, desync, native

__all__ = ["Messages", "Scale", "counted_messages", "fake_job", "main", "measure"]

RANKS, UNITS = (8, 64, 512, 1024, 4096, 16384), (10, 100, 1000)
PHASES = ("init_mesh", "make_plan", "shard", "fully_shard", "first step", "step")
HEADER = ("units", "ranks", *(f"{phase}, ms" for phase in PHASES), "heap, KiB", "of it torch's", "resident, MiB",
          "plan, KiB", "messages of construction", "of a step", "bytes of them")  # fmt: skip


@dataclass(slots=True)
class Messages:
    """The messages of the desync detectors: those beside the data of collectives.

    Attributes:
        count: how many calls of torch's collectives there were.
        bytes: size of all tensors that were passed to these calls, outputs included.
    """

    count: int = 0
    bytes: int = 0

    def __getattr__(self, name: str) -> Any:
        """Return torch's function of this name, counted if it is passed tensors."""
        real = getattr(dist, name)
        if name not in ("all_gather", "all_reduce", "broadcast"):
            return real

        def counted(*tensors: Any, **options: Any) -> Any:
            self.count += 1
            for each in tensors:
                self.bytes += sum(part.nbytes for part in (each if isinstance(each, list) else [each]))
            return real(*tensors, **options)

        return counted


@contextmanager
def counted_messages() -> Iterator[Messages]:
    """Count the messages of detectors in the ``with`` block."""
    messages = Messages()
    real, desync.dist = desync.dist, messages  # type: ignore[assignment, attr-defined]
    try:
        yield messages
    finally:
        desync.dist = real  # type: ignore[attr-defined]


@contextmanager
def fake_job(ranks: int, rank: int = 1) -> Iterator[None]:
    """Make this process one rank of a job of ``ranks``, of which no other rank exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    # Why: those of torch's fake group copy the part of each rank, in a loop.
    real = native.gather_single, native.scatter_single
    native.gather_single, native.scatter_single = _gather, _scatter
    try:
        yield
    finally:
        native.gather_single, native.scatter_single = real
        dist.destroy_process_group()


def _gather(out: torch.Tensor, shard: torch.Tensor, *, group: Any, async_op: bool) -> Any:
    out.view(-1, shard.numel()).copy_(shard.reshape(1, -1).expand(out.numel() // max(shard.numel(), 1), -1))
    return DONE


def _scatter(out: torch.Tensor, full: torch.Tensor, *, group: Any, async_op: bool) -> Any:
    out.view(-1).copy_(full.view(-1)[: out.numel()])
    return DONE


@dataclass(frozen=True, slots=True)
class Scale:
    """The measurements of one rank.

    Attributes:
        ranks: number of ranks of the job.
        units: number of units of the model.
        seconds: processor time of each phase.
        heap: bytes of Python objects that are held after two steps.
        heap_torch: those of them that files of torch allocated.
        resident: bytes of the process's memory then, above those before the mesh was made.
        plan: ``plan.to_json()``.
        construction: messages before the first step.
        step: messages of the third step.
    """

    ranks: int
    units: int
    seconds: dict[str, float]
    heap: int
    heap_torch: int
    resident: int
    plan: str
    construction: Messages
    step: Messages = field(default_factory=Messages)

    def row(self) -> list[str]:
        """Return the cells of a row of the table."""
        times = [f"{1000 * self.seconds[phase]:.1f}" for phase in PHASES]
        memory = [f"{self.heap / 1024:,.0f}", f"{self.heap_torch / 1024:,.0f}", f"{self.resident / 2**20:.1f}"]
        messages = [
            f"{self.construction.count}: {self.construction.bytes:,} B",
            f"{self.step.count}",
            f"{self.step.bytes:,}",
        ]
        return [f"{self.units:,}", f"{self.ranks:,}", *times, *memory, f"{len(self.plan) / 1024:,.1f}", *messages]


def measure(ranks: int, units: int, *, trace_memory: bool = True) -> Scale:
    """Build and train a model of ``units`` units as one of ``ranks`` ranks, in this process.

    Arguments:
        ranks: number of ranks; no process group may be initialised.
        units: number of units, each with two leaves of six elements together.
        trace_memory: whether to measure the heap, which makes everything else slower.
    """
    seconds = Phases()
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(units)])
    apply, params, buffers = fs.make_functional(net)
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
    x = torch.ones(1, 2)
    with fake_job(ranks), counted_messages() as messages:
        gc.collect()
        resident = _resident()
        if trace_memory:
            tracemalloc.start()
        mesh = seconds.timed("init_mesh", lambda: fs.init_mesh(device="cpu"))
        plan = seconds.timed("make_plan", lambda: fs.make_plan(params, mesh, units=["*"], bucket_bytes=0))
        shards = seconds.timed("shard", lambda: fs.shard(params, plan, mesh))
        sharded = seconds.timed("fully_shard", lambda: fs.fully_shard(apply, plan, mesh))
        step = fs.make_train_step(lambda shards, own, x: sharded(shards, own, x).square().mean(), optimizer, plan, mesh)
        state = step.init(shards, buffers)
        construction = Messages(messages.count, messages.bytes)
        state, _ = seconds.timed("first step", lambda: step(state, x))
        state, _ = step(state, x)
        before = Messages(messages.count, messages.bytes)
        state, _ = seconds.timed("step", lambda: step(state, x))
        own = Messages(messages.count - before.count, messages.bytes - before.bytes)
        gc.collect()
        heap = heap_torch = 0
        if trace_memory:
            snapshot = tracemalloc.take_snapshot()
            tracemalloc.stop()
            heap = sum(trace.size for trace in snapshot.traces)
            heap_torch = sum(trace.size for trace in snapshot.traces if "/torch/" in trace.traceback[0].filename)
        text = plan.to_json()
        return Scale(ranks, units, seconds, heap, heap_torch, _resident() - resident, text, construction, own)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of the command line's numbers of ranks and units."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks (default %(default)s)")
    parser.add_argument("--units", type=int, nargs="+", default=UNITS, help="numbers of units (default %(default)s)")
    parser.add_argument("--one", action="store_true", help="measure the first numbers in this process, and print JSON")
    options = parser.parse_args(arguments)
    if options.one:
        memory = measure(options.ranks[0], options.units[0])
        times = measure(options.ranks[0], options.units[0], trace_memory=False)
        print(json.dumps({**asdict(memory), "seconds": times.seconds}))
        return
    print("|", " | ".join(HEADER), "|\n|", " | ".join("---" for _ in HEADER), "|")
    for units in options.units:
        for ranks in options.ranks:
            command = [sys.executable, "-m", "benchmarks.scale", "--one", "--ranks", str(ranks), "--units", str(units)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print("|", " | ".join(_scale(found).row()), "|", flush=True)


def _scale(data: dict[str, Any]) -> Scale:
    named = {each.name: data[each.name] for each in fields(Scale)}
    return Scale(**{**named, "construction": Messages(**data["construction"]), "step": Messages(**data["step"])})


def _resident() -> int:
    """Return the bytes of this process's memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


if __name__ == "__main__":
    main()
