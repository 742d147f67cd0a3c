"""Forks, other programs and ends of processes in random order: every rank ends in time, as it said."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import funcshard as fs
from tests.hostile.campaign import Campaign
from tests.hostile.nursery import check_nothing_left, descendants, needs_linux, open_files, spawn, wait_all
from tests.hostile.training import BOUND, Job, meeting_point, rank_of_job, run_campaign

pytestmark = [pytest.mark.hostile, needs_linux]

KEPT: list[Any] = []  # what lives until the interpreter ends


def add_up(mesh: fs.Mesh, size: int = 40_000) -> None:
    for axis in [name for name, each in mesh.shape.items() if each > 1]:
        total = fs.psum(torch.full((size,), float(mesh.rank)), mesh, axis=axis)
        assert total.numel() == size


# --- what happens before the end --------------------------------------------------------------------


def in_a_forked_child(call: Callable[[], object], *, waits: bool = True) -> None:
    child = os.fork()
    if not child:
        call()
        os._exit(0)
    if waits:
        os.waitpid(child, 0)


def start_and_join(process: Any) -> None:
    process.start()
    process.join()


def save_in_the_background(mesh: fs.Mesh, job: Job) -> None:
    params = {"w": torch.arange(1000.0)}
    plan = fs.make_plan(params, mesh)
    KEPT.append(fs.save(job.checkpoints / "background", fs.shard(params, plan, mesh), plan, mesh, wait=False))
    KEPT[-1].wait()


def make_another_mesh(mesh: fs.Mesh, job: Job) -> None:
    KEPT.append(fs.init_mesh(mesh.shape, device="cpu"))
    add_up(KEPT[-1])


def use_the_mesh_at_exit(mesh: fs.Mesh, job: Job) -> None:
    def last() -> None:
        with contextlib.suppress(RuntimeError):  # the other ranks may have gone
            fs.psum(torch.ones(3), mesh)

    atexit.register(last)


# What all ranks do together, and what a rank does by itself.
TOGETHER: tuple[Callable[[fs.Mesh, Job], object], ...] = (
    lambda mesh, job: start_and_join(threading.Thread(target=add_up, args=(mesh,))),
    save_in_the_background,
    make_another_mesh,
    use_the_mesh_at_exit,
)
ALONE: tuple[Callable[[fs.Mesh, Job], object], ...] = (
    lambda mesh, job: subprocess.run([sys.executable, "-S", "-c", "pass"], check=True, timeout=30),
    lambda mesh, job: KEPT.append(subprocess.Popen(["sleep", "600"], close_fds=False)),
    lambda mesh, job: start_and_join(multiprocessing.get_context("fork").Process(target=int)),
    lambda mesh, job: in_a_forked_child(lambda: time.sleep(600), waits=False),
    lambda mesh, job: in_a_forked_child(int),
    lambda mesh, job: in_a_forked_child(lambda: exit_as_an_interpreter(0)),  # with the mesh in it
    lambda mesh, job: in_a_forked_child(KEPT.clear),  # drops meshes
    lambda mesh, job: KEPT.append(mesh),
    lambda mesh, job: atexit.register(lambda: mesh.rank),
)


# --- the end: each returns the exit code, or ends the process ---------------------------------------


def exit_as_an_interpreter(code: int) -> None:
    """End this process as Python does: threads, exit functions, modules, and static destructors."""
    ctypes.pythonapi.Py_Exit(code)


def by_a_signal() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)


# How a rank ends, and its exit code.
ENDS: dict[str, tuple[Callable[[], object], int]] = {
    "returns": (lambda: None, 0),
    "sys.exit": (lambda: sys.exit(3), 3),
    "os._exit": (lambda: os._exit(4), 4),
    "an error": (lambda: {}["the end of this rank"], 1),
    "a signal": (by_a_signal, -signal.SIGTERM),
    "a kill": (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    "destroys the groups": (torch.distributed.destroy_process_group, 0),
}


def act(enter: Callable[[], None], mesh: fs.Mesh, job: Job, seed: int) -> None:
    """Do the deeds of a seed, in which ranks differ where they may, and end as the seed says."""
    draw, own = Random(seed), Random(seed * 7 + mesh.rank)
    for _ in range(draw.randrange(1, 6)):
        deed = draw.choice([*TOGETHER, *ALONE])
        if deed in TOGETHER or own.random() < 0.6:
            deed(mesh, job)
        add_up(mesh, draw.choice([3, 40_000]))
    enter()
    ENDS[end_of(seed, mesh.rank)][0]()


def end_of(seed: int, rank: int) -> str:
    return Random(seed * 11 + rank).choice(list(ENDS))


def end_in_some_order(job: Job, seed: int) -> dict[str, int]:
    files, store = open_files(), meeting_point(job.world_size)

    def main(enter: Callable[[], None], mesh: fs.Mesh, job: Job) -> None:
        act(enter, mesh, job, seed)

    ranks = [
        spawn(rank_of_job, main, job, rank, store.port, log=job.folder / f"{rank}.log", leave=exit_as_an_interpreter)
        for rank in range(job.world_size)
    ]
    ended = wait_all(ranks, BOUND)
    what = f"{job}, ends {[end_of(seed, rank) for rank in range(job.world_size)]}"
    for rank, each in enumerate(ended):
        _, meant = ENDS[end_of(seed, rank)]
        told = f"{what}: rank {rank} ended with {each.code}, not {meant}: {each.error}\n{each.output[-3000:]}"
        assert each.code == meant, told
        assert "Fatal" not in each.output, told
        assert "terminate called" not in each.output, told
    store.close()
    left = descendants(os.getpid())
    assert all(Path(f"/proc/{pid}/comm").read_text().strip() in ("sleep", "python", "python3") for pid in left), what
    check_nothing_left(files, left)
    return {"orders": 1}


@pytest.mark.nightly
def test_ranks_that_fork_run_programs_and_end_in_any_order_end_in_time(campaign: Campaign) -> None:
    run_campaign(campaign, end_in_some_order, short=4, full=100, limit=2 * BOUND)
