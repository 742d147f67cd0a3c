"""Thousands of steps, saves and meshes: memory, open files and threads stay what they were."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

import funcshard as fs
from tests.hostile.campaign import FULL, Campaign
from tests.hostile.nursery import check_nothing_left, needs_linux, open_files
from tests.hostile.training import BOUND, STEPS, Job, make_program, run_campaign, run_job

pytestmark = [pytest.mark.hostile, needs_linux]

# What may grow over all steps after the first tenth: pages of allocators in KiB, bytes of our objects, and a block of
# shared memory.
MOST = {"files": 2, "threads": 0, "traced": 60_000, "resident": 6_000}
HOME = str(Path(fs.__file__).parent)


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
    assert all(grown[name] <= most for name, most in MOST.items()), f"{what}: {grown}, more than {MOST}"


def measure() -> dict[str, int]:
    gc.collect()
    ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, f"{HOME}/*")])
    size = sum(each.size for each in ours.statistics("filename"))
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024  # in KiB
    return {"files": len(open_files()), "threads": threading.active_count(), "traced": size, "resident": resident}


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
    steps = TIMES[what][campaign.rounds != FULL]
    run_campaign(campaign, watch_a_job, steps, what, short=1, full=4, limit=2 * BOUND + steps * 0.5, timeout=60.0)
