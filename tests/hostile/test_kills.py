"""Ranks are killed at any moment: the survivors end in time and say why, and no saved step is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest

import funcshard as fs
from tests.hostile.campaign import Campaign
from tests.hostile.nursery import Ended, check_nothing_left, descendants, in_nursery, needs_linux, open_files, wait_all
from tests.hostile.training import KEEP, STEPS, Job, meeting_point, run_job, start

pytestmark = [pytest.mark.hostile, needs_linux]

BOUND = 45.0  # seconds in which ranks start, or end by themselves
PHASES = {"construction": 1, "restore": 2, "steps": 3, "save": 4, "later save": 6}
VICTIMS = ("one rank", "one rank whose child lives on", "all ranks", "all ranks but one")


def check_survivors(ended: list[Ended], killed: list[int], what: str) -> None:
    for rank, each in enumerate(ended):
        if rank not in killed:
            told = f"{what}: rank {rank} ended with exit code {each.code}: {each.error}\n{each.output[-2000:]}"
            assert each.code in (0, 1), told
            assert each.code == 0 or (each.error and not each.fault), f"{told}\n{each.fault}"


def finish(job: Job, name: str) -> None:
    """Run a job to its end without faults, one step more at least, and check what it leaves."""
    job = dataclasses.replace(job, steps=STEPS)
    run_job(job, BOUND, name)
    names = sorted(path.name for path in job.checkpoints.iterdir())
    assert f"step-{STEPS}" in names
    assert len(names) <= KEEP, names
    assert all(name.startswith("step-") for name in names), f"leftovers: {names}"


def kill_some(job: Job, seed: int, times: int) -> dict[str, int]:
    """Start a job and kill some of its ranks, several times; then run it to its end."""
    draw, counts = Random(seed), Counter[str]()
    files, left = open_files(), []
    for attempt in range(times):
        phase, which = draw.choice(list(PHASES)), draw.choice(VICTIMS)
        first = draw.randrange(job.world_size)
        everyone = list(range(job.world_size))
        killed = [first] if which.startswith("one rank") else [r for r in everyone if which == "all ranks" or r != first]
        reached = fs.latest(job.checkpoints, thorough=True)
        before = int(reached.name.removeprefix("step-")) if reached else 0
        forking = killed if which == "one rank whose child lives on" else ()
        store = meeting_point(job.world_size)
        ranks = start(dataclasses.replace(job, forking=tuple(forking)), store, f"attempt-{attempt}")
        met = all(ranks[killed[0]].wait_for_phase(BOUND) for _ in range(PHASES[phase]))
        time.sleep(draw.random() ** 2 * 0.05)
        for rank in killed:
            os.kill(ranks[rank].pid, signal.SIGKILL)
        what = f"{which} killed in {phase} of {job}"
        check_survivors(wait_all(ranks, job.bound), killed, what)
        store.close()
        more = [pid for pid in descendants(os.getpid()) if pid not in left]  # a child may outlive any forking rank
        assert len(more) <= len(forking), f"{what}: {len(more)} processes are left by {len(forking)} ranks that forked one"
        left += more
        counts.update({"kills": len(killed), f"killed in {phase}": int(met)})
        reached = fs.latest(job.checkpoints, thorough=True)
        after = int(reached.name.removeprefix("step-")) if reached else 0
        assert after >= before, f"{what}: step {before} had been saved, and now the last is step {after}"
    finish(job, "last")
    check_nothing_left(files, left)
    return dict(counts)


@contextlib.contextmanager
def empty_folder():
    with tempfile.TemporaryDirectory(prefix="hostile-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "checkpoints").mkdir()
        yield Path(folder)


@pytest.mark.nightly
def test_ranks_killed_at_any_moment_end_in_time_and_lose_no_saved_step(campaign: Campaign) -> None:
    def one(draw: Random) -> dict[str, int]:
        with empty_folder() as folder:
            job, seed, times = Job.draw(draw, folder), draw.getrandbits(32), draw.choice([1, 1, 2])
            return in_nursery(kill_some, job, seed, times, limit=times * 2 * job.bound + 60)

    campaign.run(one, short=2, full=150, limit=300)
