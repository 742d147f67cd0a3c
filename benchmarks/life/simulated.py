"""A step of simulated ranks in one process, against as many steps of one rank alone.

One thread computes on both sides. The rank alone has the whole parameters and communicates with
no other rank; its optimizer updates all of them, in place of a share of each rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import funcshard as fs
from benchmarks.life.case import Case, Place, Turn
from benchmarks.peers import ours
from benchmarks.shapes import SHAPES

__all__ = ["CASES"]

RANKS = 4
WARM_STEPS = 2  # they make the optimizer's state, and learn the order of units


def _turn(place: Place, ranks: int, repeated: int) -> Turn:
    """Return a turn that takes a step on each of the simulated ranks, ``repeated`` times."""
    shape = SHAPES["tiny" if place.tiny else "demo"]
    # Why here: the random numbers of batches are no part of a step.
    batches = [shape.batches(rank) for rank in range(ranks)]

    def train(mesh: fs.Mesh, clock: Callable[[], None]) -> None:
        step, state = ours(shape, "full_shard", mesh)
        for number in range(WARM_STEPS + repeated):
            if number == WARM_STEPS:
                fs.psum(torch.zeros(1), mesh)  # a barrier
                clock()
            state, _ = step(state, batches[mesh.rank][number % len(batches[mesh.rank])])
        fs.psum(torch.zeros(1), mesh)
        clock()

    def turn() -> None:
        walls: list[float] = []
        processors: list[float] = []

        def clock() -> None:
            walls.append(time.perf_counter())
            processors.append(time.process_time())

        fs.simulate(lambda mesh: train(mesh, clock), ranks)
        # Every rank has looked at the clock before and after: the first look and the last one count.
        place.record(max(walls) - min(walls), max(processors) - min(processors))

    return turn


CASES = (
    Case(
        "simulate", f"a step of {RANKS} simulated ranks, demo GPT", f"{RANKS} steps of one rank alone", 1.1,
        lambda place: _turn(place, RANKS, 1), lambda place: _turn(place, 1, RANKS), ranks=(1,), most_rounds=6,
    ),
)  # fmt: skip
