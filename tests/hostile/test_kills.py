"""Ranks are killed at any moment: the survivors end in time and say why, and no saved step is lost."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections import Counter
from random import Random

import pytest

import funcshard as fs
from tests.hostile.campaign import Campaign
from tests.hostile.nursery import Ended, check_nothing_left, descendants, needs_linux, open_files, wait_all
from tests.hostile.training import BOUND, KEEP, STEPS, Job, meeting_point, run_campaign, run_job, start

pytestmark = [pytest.mark.hostile, needs_linux]

PHASES = {"construction": 1, "restore": 2, "steps": 3, "save": 4, "later save": 6}
VICTIMS = ("one rank", "one rank whose child lives on", "all ranks", "all ranks but one")


def check_survivors(ended: list[Ended], killed: list[int], what: str) -> None:
    for rank, each in enumerate(ended):
        if rank not in killed:
            told = f"{what}: rank {rank} ended with exit code {each.code}: {each.error}\n{each.output[-2000:]}"
            assert each.code in (0, 1), told
            assert each.code == 0 or (each.error and not each.fault), f"{told}\n{each.fault}"


def last_step(job: Job) -> int:
    last = fs.latest(job.checkpoints, thorough=True)
    return int(last.name.removeprefix("step-")) if last else 0


def finish(job: Job, name: str) -> None:
    """Run a job to its end without faults, one step more at least, and check what it leaves."""
    job = dataclasses.replace(job, steps=STEPS)
    run_job(job, BOUND, name)
    names = sorted(path.name for path in job.checkpoints.iterdir())
    assert f"step-{STEPS}" in names
    assert len(names) <= KEEP, names
    assert all(name.startswith("step-") for name in names), f"leftovers: {names}"


def kill_some(job: Job, seed: int) -> dict[str, int]:
    """Start a job and kill some of its ranks, once or twice; then run it to its end."""
    draw, counts = Random(seed), Counter[str]()
    files, left = open_files(), []
    for attempt in range(draw.choice([1, 1, 2])):
        phase, which = draw.choice(list(PHASES)), draw.choice(VICTIMS)
        first = draw.randrange(job.world_size)
        everyone = list(range(job.world_size))
        killed = [first] if which.startswith("one rank") else [r for r in everyone if which == "all ranks" or r != first]
        before = last_step(job)
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
        after = last_step(job)
        assert after >= before, f"{what}: step {before} had been saved, and now the last is step {after}"
    finish(job, "last")
    check_nothing_left(files, left)
    return dict(counts)


@pytest.mark.nightly
def test_ranks_killed_at_any_moment_end_in_time_and_lose_no_saved_step(campaign: Campaign) -> None:
    run_campaign(campaign, kill_some, short=2, full=150, limit=270)
