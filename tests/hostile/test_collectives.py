"""Random collectives that overlap, of ranks that are paused: every result is what it has to be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

import pytest
import torch

import funcshard as fs
from tests.collective_oracle import results_of
from tests.hostile.campaign import Campaign, slowness
from tests.hostile.nursery import Rank, check_nothing_left, in_nursery, needs_linux, open_files
from tests.hostile.pauses import Pauses
from tests.hostile.training import BOUND, Job, empty_folder, run_job

pytestmark = [pytest.mark.hostile, needs_linux]

SHAPES: tuple[Mapping[str, int], ...] = (
    {"shard": 2}, {"shard": 3}, {"shard": 4}, {"replicate": 2, "shard": 2}, {"shard": 2, "tensor": 2},
    {"stage": 2, "shard": 1},
)  # fmt: skip
A_ROUND = 40  # times that collectives of each kind are started together


def overlapping(draw: Random, mesh: fs.Mesh, seed: int, number: int) -> str:
    """Start one collective of each kind on a group, wait for them in random order, and compare."""
    axis = draw.choice([name for name, size in mesh.shape.items() if size > 1])
    group, n = mesh.groups[axis], draw.choice([3, 1000, 30_000])
    generator = torch.Generator().manual_seed(seed % 2**31 + number * 5)
    # Sums are in order of ranks, to the bit, on every backend.
    parts = [torch.randn(n, generator=generator) for _ in range(group.size)]
    results = results_of(group, parts, lambda works: draw.sample(works, len(works)))
    wrong = [kind for kind, (found, meant) in results.items() if not torch.equal(found, meant)]
    return f"number {number}, {wrong} of {n} elements along {axis}, beside others" if wrong else ""


def collectives(enter: Callable[[], None], mesh: fs.Mesh, seed: int) -> None:
    draw = Random(seed)  # the same draws on every rank
    enter()
    for number in range(A_ROUND):
        fault = overlapping(draw, mesh, seed, number)
        assert not fault, f"rank {mesh.rank}: {fault}"


def paused_collectives(folder: str, seed: int, shape: Mapping[str, int], shared_memory: bool) -> dict[str, int]:
    files, pauses = open_files(), Counter[str]()
    job = Job(Path(folder), shape, shared_memory, patience=0.3, timeout=60.0 * slowness())

    def pause(ranks: list[Rank]) -> Pauses:
        for rank in ranks:  # a pause in the construction is another campaign's
            assert all(rank.wait_for_phase(BOUND) for _ in range(2)), rank.log.read_text()
        return Pauses(Random(seed), ranks, 1.5, pauses)

    run_job(job, BOUND + A_ROUND, main=lambda enter, mesh, job: collectives(enter, mesh, seed), meanwhile=pause)
    check_nothing_left(files)
    return {"collectives": A_ROUND, **pauses}


@pytest.mark.nightly
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
def test_collectives_of_paused_ranks_give_what_each_rank_computes(campaign: Campaign, shared_memory: bool) -> None:
    limit = BOUND + 2 * A_ROUND

    def one(draw: Random) -> dict[str, int]:
        with empty_folder() as folder:
            arguments = str(folder), draw.getrandbits(32), draw.choice(SHAPES), shared_memory
            return in_nursery(paused_collectives, *arguments, limit=limit)

    campaign.run(one, short=1, full=100, limit=limit + 30)
