"""Rank processes in which peers take turns with their steps."""

from __future__ import annotations

import time

import torch.distributed as dist

from benchmarks.peers import Step, made
from benchmarks.rank_processes import RankProcesses
from benchmarks.shapes import SHAPES


class Ranks(RankProcesses):
    """The processes of a race of steps; a context manager."""

    def __init__(self, size: int) -> None:
        super().__init__(size, _Rank, preload=["benchmarks.turns", "torch._dynamo"], timeout=600.0)

    def steps(self, peer: str, number: int) -> tuple[float, list[float]]:
        """Run steps of a peer; return the slowest rank's seconds, and each step's mean loss over ranks."""
        seconds, losses = zip(*self.call("steps", peer, number), strict=True)
        return max(seconds), [sum(each) / len(each) for each in zip(*losses, strict=True)]


class _Rank:
    """The state of one rank between its turns."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.shape = rank, ""

    def make(self, peer: str, shape: str) -> None:
        if shape != self.shape:
            self.runs: dict[str, Step] = {}
            self.taken: dict[str, int] = {}
            self.shape, self.batches = shape, SHAPES[shape].batches(self.rank)
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
