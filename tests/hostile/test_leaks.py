"""Thousands of steps, saves and meshes: memory, open files and threads stay what they were."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

import funcshard as fs
from tests.hostile.campaign import FULL, Campaign
from tests.hostile.nursery import check_nothing_left, in_nursery, needs_linux, open_files
from tests.hostile.test_kills import BOUND, empty_folder
from tests.hostile.training import STEPS, Job, make_program, run_job

pytestmark = [pytest.mark.hostile, needs_linux]

# What may grow over all steps after the first tenth: pages of allocators, and a block of shared memory.
MOST_KIB, MOST_TRACED, MOST_FILES = 6_000, 60_000, 2
HOME = str(Path(fs.__file__).parent)


def resident() -> int:
    """Return the memory of this process, in KiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def watch(enter: Callable[[], None], mesh: fs.Mesh, job: Job, steps: int, what: str) -> None:
    program = make_program(mesh)
    state = program.first()
    enter()
    tracemalloc.start(1)
    first: dict[str, int] = {}
    for number in range(steps):
        if number == steps // 10:
            first = measure()
        if what == "steps":
            state, _ = program.step(state, program.batch(number % STEPS))
        elif what == "saves":
            path = job.checkpoints / f"step-{number % 3}"
            fs.save(path, {"train": state}, program.plan, mesh, wait=bool(number % 2), keep=2).wait()
            state = fs.restore(path, program.plan, mesh)["train"]
        else:
            make_program(fs.init_mesh(mesh.shape, device="cpu")).first()
        # Why after each mesh: its gloo groups go when the next mesh is made, after it was collected.
        if what == "meshes" or number % 50 == 0:
            gc.collect()
    last = measure()
    grown = {name: last[name] - first[name] for name in last}
    print(f"rank {mesh.rank}: {grown}", flush=True)
    assert grown["files"] <= MOST_FILES, f"{what}: {grown['files']} more open files"
    assert grown["threads"] <= 0, f"{what}: {grown['threads']} more threads"
    assert grown["traced"] <= MOST_TRACED, f"{what}: {grown['traced']} bytes more of objects of this library"
    assert grown["resident"] <= MOST_KIB, f"{what}: {grown['resident']} KiB more memory"


def measure() -> dict[str, int]:
    gc.collect()
    ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, f"{HOME}/*")])
    size = sum(each.size for each in ours.statistics("filename"))
    return {"files": len(open_files()), "threads": threading.active_count(), "traced": size, "resident": resident()}


def watch_a_job(job: Job, seed: int, steps: int, what: str) -> dict[str, int]:
    files = open_files()
    run_job(job, BOUND + steps * 0.5, main=lambda enter, mesh, job: watch(enter, mesh, job, steps, what))
    check_nothing_left(files)
    return {what: steps}


# The number of a round of the whole campaign, and of the short part.
TIMES = {"steps": (3000, 100), "saves": (400, 30), "meshes": (100, 10)}


@pytest.mark.nightly
@pytest.mark.parametrize("what", TIMES)
def test_nothing_grows(campaign: Campaign, what: str) -> None:
    def one(draw: Random) -> dict[str, int]:
        long, brief = TIMES[what]
        steps = long if campaign.rounds == FULL else brief
        with empty_folder() as folder:
            job, seed = Job.draw(draw, folder, timeout=60.0), draw.getrandbits(32)
            return in_nursery(watch_a_job, job, seed, steps, what, limit=2 * BOUND + steps * 0.5)

    campaign.run(one, short=1, full=4, limit=3600)
