"""Measure how much of a slow all-gather overlaps with computation, from a profiler trace.

One GPU has no other rank to gather from. So the other rank is torch's "fake" process group, whose
collectives return at once and move nothing: the losses are meaningless, but the order of kernels is
the real one. Each all-gather then sleeps on a stream of its own (``funcshard.testing.delayed``),
and the trace shows the kernels that ran meanwhile.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import funcshard as fs
from funcshard.testing import delayed

__all__ = ["Kernel", "held_up", "kernels", "pretended", "traced"]

SLEEP = "spin_kernel"  # the kernel of torch.cuda._sleep


class Kernel(NamedTuple):
    """A kernel that ran on a GPU: start and end, stream, name, and when the host launched it; in microseconds."""

    start: float
    end: float
    stream: int
    name: str
    launched: float


@contextlib.contextmanager
def pretended(device: str, seconds: float, world_size: int = 2) -> Iterator[fs.Mesh]:
    """Yield the mesh of rank 0 of a pretended world, whose all-gathers take ``seconds``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the "fake" backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield delayed(fs.init_mesh(device=device), "all_gather", seconds)
    finally:
        dist.destroy_process_group()


def traced(run: Callable[[], object], file: Path, device: str, steps: int = 3, warm: int = 3) -> list[Kernel]:
    """Run steps under the profiler, write the Chrome trace to ``file``, and return its kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(warm):
        run()
    finish()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            run()
        finish()
    profile.export_chrome_trace(str(file))
    return kernels(json.loads(file.read_text()))


def kernels(trace: dict[str, Any]) -> list[Kernel]:
    """Return the GPU kernels of a Chrome trace."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    # Why by correlation: the profiler gives one number to a launch and to its kernel.
    launches = {
        event["args"]["correlation"]: event["ts"] for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    return [
        Kernel(
            event["ts"],
            event["ts"] + event["dur"],
            event["args"]["stream"],
            event["name"],
            launches.get(event["args"]["correlation"], event["ts"]),
        )
        for event in events
        if event.get("cat") == "kernel"
    ]


def held_up(found: Iterable[Kernel]) -> tuple[int, float, float]:
    """Return the number of sleeps, their microseconds, and those in which they held other kernels up.

    A sleep holds a kernel up while the device runs no other kernel and the host has launched this
    one. A device that idles because the host has launched nothing is not held up.
    """
    every = sorted(found)
    sleeps = [kernel for kernel in every if SLEEP in kernel.name]
    held, busy_until = 0.0, 0.0
    for kernel in every:
        if SLEEP in kernel.name:
            continue
        idle_from = max(busy_until, kernel.launched)
        held += sum(max(0.0, min(kernel.start, sleep.end) - max(idle_from, sleep.start)) for sleep in sleeps)
        busy_until = max(busy_until, kernel.end)
    return len(sleeps), sum(sleep.end - sleep.start for sleep in sleeps), held
