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
from tests.hostile.nursery import check_nothing_left, descendants, in_nursery, needs_linux, open_files, spawn, wait_all
from tests.hostile.test_kills import BOUND, empty_folder
from tests.hostile.training import Job, meeting_point, rank_of_job

pytestmark = [pytest.mark.hostile, needs_linux]

KEPT: list[Any] = []  # what lives until the interpreter ends


def add_up(mesh: fs.Mesh, size: int = 40_000) -> None:
    for axis in [name for name, each in mesh.shape.items() if each > 1]:
        total = fs.psum(torch.full((size,), float(mesh.rank)), mesh, axis=axis)
        assert total.numel() == size


# --- what happens before the end; every rank does the same, one of them has the side effect -------


def run_a_program(mesh: fs.Mesh, job: Job) -> None:
    subprocess.run([sys.executable, "-S", "-c", "pass"], check=True, timeout=30)


def fork_a_child_that_lives_on(mesh: fs.Mesh, job: Job) -> None:
    if not os.fork():
        time.sleep(600)
        os._exit(0)


def fork_a_child_that_returns(mesh: fs.Mesh, job: Job) -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def fork_a_child_that_exits(mesh: fs.Mesh, job: Job) -> None:
    """The child finalizes an interpreter with the mesh in it."""
    child = os.fork()
    if not child:
        ctypes.pythonapi.Py_Exit(0)
    os.waitpid(child, 0)


def fork_a_child_that_drops_the_mesh(mesh: fs.Mesh, job: Job) -> None:
    child = os.fork()
    if not child:
        KEPT.clear()
        del mesh
        os._exit(0)
    os.waitpid(child, 0)


def start_a_process(mesh: fs.Mesh, job: Job) -> None:
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()


def start_a_program_that_lives_on(mesh: fs.Mesh, job: Job) -> None:
    KEPT.append(subprocess.Popen(["sleep", "600"], close_fds=False))


def collect_in_a_thread(mesh: fs.Mesh, job: Job) -> None:
    thread = threading.Thread(target=add_up, args=(mesh,))
    thread.start()
    thread.join()


def save_in_the_background(mesh: fs.Mesh, job: Job) -> None:
    params = {"w": torch.arange(1000.0)}
    plan = fs.make_plan(params, mesh)
    KEPT.append(fs.save(job.checkpoints / "background", fs.shard(params, plan, mesh), plan, mesh, wait=False))
    KEPT[-1].wait()


def keep_the_mesh(mesh: fs.Mesh, job: Job) -> None:
    KEPT.append(mesh)


def make_another_mesh(mesh: fs.Mesh, job: Job) -> None:
    KEPT.append(fs.init_mesh(mesh.shape, device="cpu"))
    add_up(KEPT[-1])


def register_an_exit(mesh: fs.Mesh, job: Job) -> None:
    atexit.register(lambda: mesh.rank)


def use_the_mesh_at_exit(mesh: fs.Mesh, job: Job) -> None:
    def last() -> None:
        with contextlib.suppress(RuntimeError):  # the other ranks may have gone
            fs.psum(torch.ones(3), mesh)

    atexit.register(last)


DEEDS = (
    run_a_program, fork_a_child_that_lives_on, fork_a_child_that_returns, fork_a_child_that_exits,
    fork_a_child_that_drops_the_mesh, start_a_process, start_a_program_that_lives_on, collect_in_a_thread,
    save_in_the_background, keep_the_mesh, make_another_mesh, register_an_exit, use_the_mesh_at_exit,
)  # fmt: skip
TOGETHER = (collect_in_a_thread, save_in_the_background, make_another_mesh, use_the_mesh_at_exit)


# --- the end: each returns the exit code, or ends the process ---------------------------------------


def by_return(mesh: fs.Mesh) -> int:
    return 0


def by_sys_exit(mesh: fs.Mesh) -> int:
    sys.exit(3)


def by_os_exit(mesh: fs.Mesh) -> int:
    os._exit(4)


def by_an_error(mesh: fs.Mesh) -> int:
    raise ValueError("the end of this rank")


def by_a_signal(mesh: fs.Mesh) -> int:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
    return 9


def by_a_kill(mesh: fs.Mesh) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 9


def by_destroying_the_groups(mesh: fs.Mesh) -> int:
    torch.distributed.destroy_process_group()
    return 0


ENDS: dict[Callable[[fs.Mesh], int], int] = {
    by_return: 0, by_sys_exit: 3, by_os_exit: 4, by_an_error: 1, by_a_signal: -signal.SIGTERM, by_a_kill: -signal.SIGKILL,
    by_destroying_the_groups: 0,
}  # fmt: skip


def act(enter: Callable[[], None], mesh: fs.Mesh, job: Job, seed: int) -> int:
    """Do the deeds of a seed, in which ranks differ where they may, and end as the seed says."""
    draw, own = Random(seed), Random(seed * 7 + mesh.rank)
    for _ in range(draw.randrange(1, 6)):
        deed = draw.choice(DEEDS)
        if deed in TOGETHER or own.random() < 0.6:
            deed(mesh, job)
        add_up(mesh, draw.choice([3, 40_000]))
    enter()
    return end_of(seed, mesh.rank)(mesh)


def end_of(seed: int, rank: int) -> Callable[[fs.Mesh], int]:
    return Random(seed * 11 + rank).choice(list(ENDS))


def exit_as_an_interpreter(code: int) -> None:
    """End this process as Python does: threads, exit functions, modules, and static destructors."""
    ctypes.pythonapi.Py_Exit(code)


def end_in_some_order(job: Job, seed: int) -> dict[str, int]:
    files, store = open_files(), meeting_point(job.world_size)

    def main(enter: Callable[[], None], mesh: fs.Mesh, job: Job) -> int:
        return act(enter, mesh, job, seed)

    ranks = [
        spawn(rank_of_job, main, job, rank, store.port, log=job.folder / f"{rank}.log", leave=exit_as_an_interpreter)
        for rank in range(job.world_size)
    ]
    ended = wait_all(ranks, BOUND)
    what = f"{job}, ends {[end_of(seed, rank).__name__ for rank in range(job.world_size)]}"
    for rank, each in enumerate(ended):
        meant = ENDS[end_of(seed, rank)]
        told = f"{what}: rank {rank} ended with {each.code}, not {meant}: {each.error}\n{each.output[-3000:]}"
        assert each.code == meant, told
        assert "Fatal" not in each.output, told
        assert "terminate called" not in each.output, told
    store.close()
    left = descendants(os.getpid())
    assert all(Path(f"/proc/{pid}/comm").read_text().strip() in ("sleep", "python", "python3") for pid in left), what
    check_nothing_left(files, left)
    return {"orders": 1}


def test_ranks_that_fork_run_programs_and_end_in_any_order_end_in_time(campaign: Campaign) -> None:
    def one(draw: Random) -> dict[str, int]:
        with empty_folder() as folder:
            job, seed = Job.draw(draw, folder), draw.getrandbits(32)
            return in_nursery(end_in_some_order, job, seed, limit=2 * BOUND)

    campaign.run(one, short=4, full=100, limit=2 * BOUND + 30)
