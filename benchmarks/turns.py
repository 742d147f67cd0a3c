"""Rank processes that run one call at a time, so that peers can take turns in the same processes.

``Ranks.call`` sends a method and its arguments to every rank and waits for the answers. Between
calls the ranks sleep, and so a peer's step does not disturb that of another peer.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import funcshard as fs
from benchmarks import host, memory, traffic
from benchmarks.peers import Step, made, ours
from benchmarks.shapes import SHAPES

__all__ = ["Ranks"]

TIMEOUT = 600.0


class Ranks:
    """Processes that form one gloo group; a context manager.

    Arguments:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")  # forks from a process that has only imported modules
        # Why Dynamo: the first step of torch.optim imports it, which would count as memory of the
        # peer.
        context.set_forkserver_preload(["benchmarks.turns", "torch._dynamo"])
        self._directory = tempfile.TemporaryDirectory(prefix="race-")
        self._connections, self._processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, rank, size, self._directory.name), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._directory.cleanup()

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of ``_Rank`` on every rank and return the answers in the order of ranks."""
        for connection in self._connections:
            connection.send((method, args))
        answers = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(TIMEOUT):
                raise TimeoutError(f"rank {rank} did not answer {method}{args} within {TIMEOUT:.0f} s")
            try:
                good, answer = connection.recv()
            except EOFError:
                code = self._processes[rank].exitcode
                raise RuntimeError(f"rank {rank} ended during {method}{args}, exit code {code}: out of memory?") from None
            if not good:
                raise RuntimeError(f"rank {rank} failed in {method}{args}:\n{answer}")
            answers.append(answer)
        return answers

    def steps(self, peer: str, number: int) -> tuple[float, list[float]]:
        """Run steps of a peer; return the slowest rank's seconds, and each step's mean loss over ranks."""
        seconds, losses = zip(*self.call("steps", peer, number), strict=True)
        return max(seconds), [sum(each) / len(each) for each in zip(*losses, strict=True)]


class _Rank:
    """The state of one rank between its turns."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.shape = ""
        self.runs: dict[str, Step] = {}
        self.taken: dict[str, int] = {}

    def make(self, peer: str, shape: str) -> None:
        if shape != self.shape:
            self.runs, self.taken, self.shape = {}, {}, shape
            self.batches = SHAPES[shape].batches(self.rank)
        self.runs[peer], self.taken[peer] = made(peer, SHAPES[shape]), 0

    def steps(self, peer: str, number: int) -> tuple[float, list[float]]:
        run, losses = self.runs[peer], []
        dist.barrier()
        start = time.perf_counter()
        for _ in range(number):
            losses.append(run(self.batches[self.taken[peer] % len(self.batches)]))
            self.taken[peer] += 1
        dist.barrier()
        return time.perf_counter() - start, [loss.item() for loss in losses]

    def processor_time(self) -> float:
        """Return the seconds of processor time that this process has used."""
        return time.process_time()

    def peak(self, peer: str, shape: str, give_back: bool) -> int | None:
        """Return the peak bytes of resident memory of a peer's steps; see ``memory.measured``."""
        self.make(peer, "tiny")  # loads the library's code, which does not count
        self.steps(peer, 1)
        with memory.measured(give_back=give_back) as peak:
            self.make(peer, shape)
            self.steps(peer, 2)  # the first step makes the optimizer state
            peak.reset()
            self.steps(peer, 4)
        return peak.bytes

    def make_host(self, peers: list[str]) -> list[str]:
        self.hosts = host.host_runs(peers)
        return list(self.hosts)

    def host(self, peer: str, number: int) -> float:
        return host.timed(self.hosts[peer], number)

    def traffic(self, peer: str, shape: str) -> list[traffic.Row]:
        train_step, state = ours(SHAPES[shape], peer, fs.init_mesh(device="cpu"))
        batch = SHAPES[shape].batches(self.rank)[0]
        state, _ = train_step(state, batch)  # the first step learns the order of units
        with fs.record_events() as events:
            train_step(state, batch)
        return traffic.rows(train_step.plan, events)


def _work(connection: Any, rank: int, size: int, directory: str) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(Path(directory) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=TIMEOUT))
    dist.barrier()
    here = _Rank(rank, size)
    while True:
        try:
            method, args = connection.recv()
        except EOFError:  # the calling process has ended
            return
        try:
            call: Callable[..., Any] = getattr(here, method)
            connection.send((True, call(*args)))
        except Exception:
            connection.send((False, traceback.format_exc()))
