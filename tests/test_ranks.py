"""The pool of processes that tests use as ranks: results, errors, hangs, processes that end."""

from __future__ import annotations

import os
import time
import warnings
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch

import funcshard as fs
from tests import ranks
from tests.ranks import run_ranks, run_simulated


def add_up_ranks(mesh: fs.Mesh, offset: int) -> tuple[int, int, int]:
    return mesh.rank, mesh.world_size, int(fs.psum(torch.tensor(mesh.rank + offset), mesh))


def pid(mesh: fs.Mesh) -> int:
    return os.getpid()


def sleep_on_rank_1(mesh: fs.Mesh, folder: Path) -> int:
    (folder / str(mesh.rank)).touch()
    if mesh.rank == 1:
        time.sleep(600)
    return add_up_ranks(mesh, 0)[-1]


class HardToPickleError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def raise_on_rank_1(mesh: fs.Mesh, kind: str) -> Any:
    if mesh.rank == 1:
        raise ValueError("no good") if kind == "plain" else HardToPickleError("one", "two")
    return add_up_ranks(mesh, 0)  # waits for rank 1, which does not join


def warn(mesh: fs.Mesh) -> None:
    warnings.warn("old", DeprecationWarning, stacklevel=1)


def end_on_rank_1(mesh: fs.Mesh) -> str:
    if mesh.rank == 1:
        os._exit(3)
    try:
        add_up_ranks(mesh, 0)
    except RuntimeError as error:
        return str(error)
    return "nothing happened"


def random_and_threads(mesh: fs.Mesh) -> tuple[float, int]:
    return torch.rand(()).item(), torch.get_num_threads()


@pytest.mark.parametrize("run", [run_ranks, run_simulated])
def test_ranks_have_one_thread_and_the_same_random_state_in_every_call(run):
    torch.manual_seed(0)
    expected = torch.rand(()).item()
    for _ in range(2):
        assert run(random_and_threads, 2) == [(expected, 1)] * 2


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize("kind", ["hard to pickle", "plain"])
def test_an_error_comes_with_its_rank_and_traceback_and_the_pool_goes_on(kind):
    before = run_ranks(pid, 3)
    assert run_ranks(pid, 2) == before[:2]  # processes are kept from call to call
    start = time.monotonic()
    with pytest.raises(ValueError if kind == "plain" else RuntimeError) as caught:
        run_ranks(raise_on_rank_1, 3, kind, timeout=150)
    assert time.monotonic() - start < 100  # it has not waited for the limit
    assert str(caught.value) == ("no good" if kind == "plain" else "HardToPickleError: one and two")
    notes = "\n".join(caught.value.__notes__)
    assert "raised by raise_on_rank_1 on rank 1 of 3" in notes
    assert "in raise_on_rank_1" in notes
    assert "raised on rank 0, 2 after that" in notes
    assert run_ranks(pid, 3) == before  # no process hung, so the pool killed none


def test_a_warning_in_a_rank_is_an_error():
    with pytest.raises(DeprecationWarning, match="old"):
        run_ranks(warn, 2)


@pytest.mark.slow
def test_a_hang_shows_every_ranks_stack_within_the_limit_and_the_pool_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_once_they_hang(connections: list[Any], seconds: float) -> list[Any]:
        end = time.monotonic() + 100
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        return wait(connections, seconds)

    before = run_ranks(pid, 2)
    # Why: the limit may be over before a loaded machine has brought the ranks to where they hang.
    monkeypatch.setattr(ranks, "wait", wait_once_they_hang)
    start = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        run_ranks(sleep_on_rank_1, 2, tmp_path, timeout=1)
    assert time.monotonic() - start < 200  # rank 1 sleeps for 600 s
    monkeypatch.undo()
    message = str(caught.value)
    assert "sleep_on_rank_1 did not return on rank 0, 1 of 2 within 1 s" in message
    of_rank_0, of_rank_1 = message.split("rank 1 (still running):")
    assert "rank 0 (still running):" in of_rank_0
    assert "in add_up_ranks" in of_rank_0
    assert "in sleep_on_rank_1" in of_rank_1
    assert "in add_up_ranks" not in of_rank_1
    assert not set(run_ranks(pid, 2)) & set(before)
    assert run_ranks(add_up_ranks, 2, 0) == [(0, 2, 1), (1, 2, 1)]


@pytest.mark.nightly
def test_a_process_that_ends_is_named_and_replaced_and_leaves_the_others_results_if_it_may_end():
    with pytest.raises(RuntimeError, match="a process ended without a result: rank 1 with exit code 3, of 2 ranks"):
        run_ranks(end_on_rank_1, 2)
    first, second = run_ranks(end_on_rank_1, 2, may_die={1})
    assert second is None
    assert "nothing happened" not in first
    assert run_ranks(add_up_ranks, 2, 0) == [(0, 2, 1), (1, 2, 1)]
