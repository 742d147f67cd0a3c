"""Ranks are stopped: for a while, which changes nothing, or for good, which the others tell in time."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from random import Random

import pytest

from tests.hostile.campaign import Campaign
from tests.hostile.nursery import check_nothing_left, needs_linux, open_files, wait_all
from tests.hostile.pauses import Pauses
from tests.hostile.test_kills import PHASES, finish
from tests.hostile.training import BOUND, Job, meeting_point, run_campaign, run_job, start

pytestmark = [pytest.mark.hostile, needs_linux]

LATE = 20.0  # seconds that a loaded machine may add to a bound


def pause_a_job(job: Job, seed: int) -> dict[str, int]:
    files, pauses = open_files(), Counter[str]()
    run_job(job, 2 * BOUND, meanwhile=lambda ranks: Pauses(Random(seed), ranks, 3.0, pauses))
    finish(job, "last")
    check_nothing_left(files)
    return pauses


@pytest.mark.nightly
def test_ranks_that_pause_train_and_save_the_same_bits(campaign: Campaign) -> None:
    run_campaign(campaign, pause_a_job, short=1, full=50, limit=4 * BOUND, timeout=60.0)


def stop_for_good(job: Job, seed: int) -> dict[str, int]:
    draw, files = Random(seed), open_files()
    store = meeting_point(job.world_size)
    ranks = start(job, store)
    phase, stopped = draw.choice(["steps", "save", "later save"]), draw.randrange(job.world_size)
    assert all(ranks[stopped].wait_for_phase(BOUND) for _ in range(PHASES[phase])), ranks[stopped].log.read_text()
    time.sleep(draw.random() ** 2 * 0.05)
    os.kill(ranks[stopped].pid, signal.SIGSTOP)
    began = time.monotonic()
    others = [rank for rank in range(job.world_size) if rank != stopped]
    what = f"rank {stopped} stopped for good in {phase} of {job}"
    ended = wait_all([ranks[rank] for rank in others], job.give_up + job.patience + LATE)
    seconds = time.monotonic() - began
    for rank, each in zip(others, ended, strict=True):
        told = f"{what}: after {seconds:.1f} s rank {rank} ended with exit code {each.code}: {each.error}\n{each.output}"
        assert each.code == 0 or not each.fault, f"{told}\n{each.fault}"
        assert each.code == 0 or f"rank {stopped}" in each.error, f"the error does not name rank {stopped}; {told}"
    os.kill(ranks[stopped].pid, signal.SIGKILL)
    wait_all([ranks[stopped]], 5.0)
    store.close()
    finish(job, "last")
    check_nothing_left(files)
    return {"stops": 1, "errors": sum(each.code != 0 for each in ended)}


@pytest.mark.nightly
def test_a_rank_that_is_stopped_for_good_is_given_up_and_named_in_time(campaign: Campaign) -> None:
    # Why so long a timeout: the bound on giving up must not come from it.
    run_campaign(campaign, stop_for_good, short=1, full=30, limit=4 * BOUND, timeout=600.0, give_up=3.0)
