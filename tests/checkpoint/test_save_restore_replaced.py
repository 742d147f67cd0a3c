"""A reader finds one checkpoint at a path where another process saves, whatever it does meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.checkpoint import contents, save_restore

PARAMS = {"w": torch.zeros(300)}
PLANS = {ranks: fs.make_plan(PARAMS, ranks) for ranks in (1, 2)}


def save(path: Path, step: int, ranks: int = 1) -> None:
    def main(mesh: fs.Mesh) -> None:
        shards = fs.shard({"w": torch.full((300,), float(step))}, PLANS[ranks], mesh)
        fs.save(path, {"shards": shards, "x": torch.full((50,), float(step)), "step": step}, PLANS[ranks], mesh)

    fs.simulate(main, ranks)


def found(path: Path, mesh: fs.Mesh) -> set[float]:
    """Return the steps that the parts of a restored state are of."""
    state = fs.restore(path, PLANS[mesh.world_size], mesh)
    return {state["step"], *state["x"].tolist(), *state["shards"][""]["float32"].tolist()}


MOMENTS = {
    "before the tables are read": (contents, "read_table"),
    "before the state is read": (save_restore, "_read_state"),
}


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(
    moment: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, (where, name), steps = tmp_path / "last", MOMENTS[moment], [0]
    save(path, 0)
    work = getattr(where, name)

    def replaced(*arguments: Any) -> Any:
        if steps[-1] < times:
            steps.append(steps[-1] + 1)
            thread = threading.Thread(target=save, args=(path, steps[-1]))
            thread.start()
            thread.join()
        return work(*arguments)

    monkeypatch.setattr(where, name, replaced)
    assert found(path, fs.Mesh()) == {times}
    assert fs.latest(tmp_path, thorough=True) == path


def test_ranks_that_find_different_checkpoints_begin_again_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read, tries = tmp_path / "last", save_restore.read_contents, []
    for step in range(2):
        save(tmp_path / f"step-{step}", step, 2)

    def other(folder: Any) -> Any:
        tries.append(folder)
        contents = read(folder)
        if len(tries) == 1:
            path.unlink()
            path.symlink_to("step-1")
        return contents

    path.symlink_to("step-0")
    monkeypatch.setattr(save_restore, "read_contents", other)
    assert fs.simulate(lambda mesh: found(path, mesh), 2) == [{1}, {1}]
    assert len(tries) == 4


def test_an_error_that_has_another_reason_is_raised_at_once(tmp_path: Path) -> None:
    save(tmp_path / "last", 0)
    tries = []

    def fails(folder: Any) -> None:
        tries.append(folder)
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        contents.read_from(tmp_path / "last", fails)
    assert len(tries) == 1


def test_files_of_another_save_that_come_and_go_keep_no_checkpoint_from_being_found(tmp_path: Path) -> None:
    path, done = tmp_path / "last", threading.Event()
    save(path, 0)

    def come_and_go() -> None:
        while not done.is_set():
            (path / "0123abcd-0.part").touch()
            (path / "0123abcd-0.part").unlink()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        assert {fs.latest(tmp_path) for _ in range(300)} == {path}
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("times", [1, 3])
def test_latest_finds_one_while_another_job_saves_new_ones_and_deletes_the_old(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, read = [0], contents.read_contents

    def saved_meanwhile(path: Any) -> Any:
        if steps[-1] < times:
            steps.append(steps[-1] + 1)
            monkeypatch.setattr(contents, "read_contents", read)
            fs.save(tmp_path / f"step-{steps[-1]}", {"step": steps[-1]}, PLANS[1], fs.Mesh(), keep=1)
            monkeypatch.setattr(contents, "read_contents", saved_meanwhile)
        return read(path)

    save(tmp_path / "step-0", 0)
    monkeypatch.setattr(contents, "read_contents", saved_meanwhile)
    assert fs.latest(tmp_path) == tmp_path / f"step-{times}"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this test forks processes, and this system has no fork")
def test_an_old_job_and_its_restart_that_save_to_one_path_until_they_are_killed_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "last"
    save(path, 0)
    for number in range(10):
        before, pids = found(path, fs.Mesh()), []
        for job in (1, 2):
            pids.append(os.fork())
            if pids[-1] == 0:
                try:
                    save_again_and_again(path, 10_000 * (2 * number + job))
                finally:
                    os._exit(1)
        try:
            end, steps = time.monotonic() + 60, before
            while steps == before and time.monotonic() < end:
                steps = found(path, fs.Mesh())
                assert len(steps) == 1
            time.sleep(0.002 * number)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        assert steps != before, "neither job saved"
        assert len(found(path, fs.Mesh())) == 1
        assert fs.latest(tmp_path, thorough=True) == path
    save(path, 1)
    assert [each.name for each in tmp_path.iterdir()] == ["last"], "what the killed jobs left"


def save_again_and_again(path: Path, step: int) -> None:
    while True:
        step += 1
        try:
            save(path, step)
        except ValueError as error:
            if "a checkpoint is already being saved to" not in str(error):
                raise
