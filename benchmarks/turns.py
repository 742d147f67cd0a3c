"""Rank processes in which peers take turns with their steps."""

from __future__ import annotations

import time

import torch.distributed as dist

import funcshard as fs
from benchmarks import host, memory, traffic
from benchmarks.peers import Step, made, ours
from benchmarks.rank_processes import RankProcesses
from benchmarks.shapes import SHAPES

__all__ = ["Ranks"]


class Ranks(RankProcesses):
    """The processes of a race of steps; a context manager.

    Arguments:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        # Why Dynamo: the first step of torch.optim imports it, which would count as memory of the
        # peer.
        super().__init__(size, _Rank, preload=["benchmarks.turns", "torch._dynamo"], timeout=600.0)

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

    def peak(self, peer: str, shape: str, give_back: bool, steps: int = 4) -> int | None:
        """Return the peak bytes of resident memory of a peer's steps; see ``memory.measured``."""
        self.make(peer, "tiny")  # loads the library's code, which does not count
        self.steps(peer, 1)
        with memory.measured(give_back=give_back) as peak:
            self.make(peer, shape)
            self.steps(peer, 2)  # the first step makes the optimizer state
            peak.reset()
            self.steps(peer, steps)
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
