"""Random collectives on several axes, of ranks that are paused: every result is what it has to be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

import pytest
import torch

import funcshard as fs
from tests.collective_oracle import OPERATIONS, Operation, line, sum_in_order
from tests.hostile.campaign import Campaign, slowness
from tests.hostile.nursery import check_nothing_left, in_nursery, needs_linux, open_files, wait_all
from tests.hostile.pauses import Pauses
from tests.hostile.test_kills import BOUND, empty_folder
from tests.hostile.training import Job, meeting_point, start

pytestmark = [pytest.mark.hostile, needs_linux]

SHAPES: tuple[Mapping[str, int], ...] = (
    {"shard": 2}, {"shard": 3}, {"shard": 4}, {"replicate": 2, "shard": 2}, {"shard": 2, "tensor": 2},
    {"stage": 2, "shard": 1},
)  # fmt: skip
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32)
A_ROUND = 100  # collectives


def values(seed: int, number: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor of a rank: whole numbers, so that sums are exact in any order and dtype."""
    generator = torch.Generator().manual_seed(seed % 2**31 * 1009 + number * 17 + rank)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def on_one_axis(draw: Random, mesh: fs.Mesh, seed: int, number: int) -> str:
    """Run one random collective, and return how its result differs from the one computed here."""
    names = [name for name, size in mesh.shape.items() if size > 1]
    axis = draw.choice([*names, tuple(names)])
    along = (axis,) if isinstance(axis, str) else axis
    ranks = math.prod(mesh.shape[name] for name in along)
    name = draw.choice(list(OPERATIONS))
    operation = OPERATIONS[name]
    dtype = draw.choice([dtype for dtype in DTYPES if dtype.is_floating_point or name != "pmean"])
    shape = operation.sizes(ranks)
    if operation.sizes is Operation._field_defaults["sizes"]:  # it takes tensors of every shape
        rows = ranks * draw.choice([1, 2, 7, 700])
        shape = draw.choice([(rows,), (rows, 3), (rows, 5, 2), (2, 20_000)])
        shape = shape if len(shape) > 1 or "dim" not in name else (*shape, 1)
    line_of_ranks = line(mesh.rank, dict(mesh.shape), axis)
    tensors = [values(seed, number, rank, shape, dtype) for rank in line_of_ranks]
    me = line_of_ranks.index(mesh.rank)
    found, meant = operation.run(tensors[me], mesh, axis), operation.plain(tensors, me)
    if found.dtype == meant.dtype and torch.equal(found, meant):
        return ""
    return f"number {number}, {name} of {dtype} {shape} along {axis}: found {found.flatten()[:4]}, not {meant.flatten()[:4]}"


def overlapping(draw: Random, mesh: fs.Mesh, seed: int, number: int) -> str:
    """Start several collectives of one group, wait for them in random order, and compare."""
    axis = draw.choice([name for name, size in mesh.shape.items() if size > 1])
    group = mesh.groups[axis]
    works, faults = [], []
    for i in range(3):
        x = torch.randn(
            draw.choice([3, 1000, 30_000]), generator=torch.Generator().manual_seed(seed % 2**31 + number * 5 + i)
        )
        kind = draw.choice(["all_gather", "reduce_scatter", "all_reduce"])
        if kind == "all_gather":
            out, meant = x.new_empty(group.size * len(x)), torch.cat([x + rank for rank in range(group.size)])
            works.append((group.all_gather(out, x + group.rank), out, meant, kind))
        else:
            # Sums are in order of ranks, to the bit, on every backend.
            parts = [x * (rank + 0.3) for rank in range(group.size)]
            meant = sum_in_order(parts)
            if kind == "all_reduce":
                out = parts[group.rank].clone()
                works.append((group.all_reduce(out), out, meant, kind))
            else:
                out = torch.empty_like(x)
                full = parts[group.rank].repeat(group.size)
                works.append((group.reduce_scatter(out, [full]), out, meant, kind))
    for work, out, meant, kind in draw.sample(works, len(works)):
        work.wait()
        if not torch.equal(out, meant):
            faults.append(f"number {number}, {kind} of {len(meant)} elements along {axis}, beside two others")
    return "; ".join(faults)


def collectives(enter: Callable[[], None], mesh: fs.Mesh, job: Job, seed: int, count: int) -> None:
    draw = Random(seed)  # the same draws on every rank
    enter()
    for number in range(count):
        fault = (overlapping if draw.random() < 0.2 else on_one_axis)(draw, mesh, seed, number)
        assert not fault, f"rank {mesh.rank}: {fault}"


def paused_collectives(folder: str, seed: int, shape: Mapping[str, int], shared_memory: bool, count: int) -> dict[str, int]:
    files = open_files()
    job = Job(Path(folder), shape, shared_memory, patience=0.3, timeout=60.0 * slowness())
    store = meeting_point(job.world_size)
    ranks = start(job, store, main=lambda enter, mesh, job: collectives(enter, mesh, job, seed, count))
    for rank in ranks:  # a pause in the construction is another campaign's
        assert all(rank.wait_for_phase(BOUND) for _ in range(2)), rank.log.read_text()
    with Pauses(Random(seed), [rank.pid for rank in ranks], 1.5) as pauses:
        ended = wait_all(ranks, BOUND + count)
    for rank, each in enumerate(ended):
        assert each.code == 0, f"rank {rank} of {job}: {each.error}\n{each.output}"
    store.close()
    check_nothing_left(files)
    return {"collectives": count, "pauses": pauses.count}


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
def test_collectives_of_paused_ranks_give_what_each_rank_computes(campaign: Campaign, shared_memory: bool) -> None:
    def one(draw: Random) -> dict[str, int]:
        shape, seed = draw.choice(SHAPES), draw.getrandbits(32)
        with empty_folder() as folder:
            return in_nursery(
                paused_collectives, str(folder), seed, shape, shared_memory, A_ROUND, limit=BOUND + 2 * A_ROUND
            )

    limit = BOUND + 2 * A_ROUND
    campaign.run(one, short=1, full=100, limit=limit + 30)
