"""A save that cannot write its part says so on every rank in time, and leaves what was there."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import funcshard as fs
from funcshard.checkpoint.rank_files import write_text
from funcshard.checkpoint.writer import Writer
from tests.hostile.nursery import Ended, in_nursery, needs_linux, spawn, wait_all
from tests.hostile.test_exits import exit_as_an_interpreter
from tests.ranks import run_ranks, suspend

PARAMS = {"a": torch.arange(6.0), "b": torch.arange(4.0)}  # on two ranks, four boxes


def saved(mesh: fs.Mesh, path: Path) -> tuple[Any, Any]:
    """Return a state that was saved, and what comes back."""
    plan = fs.make_plan(PARAMS, mesh)
    state = {"shards": fs.shard(PARAMS, plan, mesh), "step": 7}
    fs.save(path, state, plan, mesh)
    return state, fs.restore(path, plan, mesh)


def test_a_text_file_is_whole_when_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    write_text(tmp_path / "index", "{}")
    assert synced == [(tmp_path / "index").stat().st_size]


def test_a_rank_that_can_make_no_file_at_all_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(work: Writer) -> None:
        raise OSError(28, "No space left on device")

    write, touch = Writer.write, Path.touch
    monkeypatch.setattr(Writer, "write", lambda work: full(work) if work.mesh.rank else write(work))
    monkeypatch.setattr(Path, "touch", lambda path, *rest, **options: full(None) if "failed" in path.name else touch(path))
    begun = time.monotonic()
    with pytest.raises(OSError, match=r"step is not saved: rank 1: .* No space left on device"):
        fs.simulate(lambda mesh: saved(mesh, tmp_path / "step"), 2)
    assert time.monotonic() - begun < 60
    assert not list(tmp_path.iterdir())


def test_a_rank_that_does_not_share_the_file_system_ends_the_save_at_once_on_every_rank(tmp_path, monkeypatch) -> None:
    exists = Path.exists

    def seen(path: Path) -> bool:
        return exists(path) and not (threading.current_thread().name == "rank 1" and path.suffix == ".part")

    def work(mesh: fs.Mesh) -> str:
        with pytest.raises(OSError, match=r"rank 0 made a file in \S+step, and this rank does not see it: save to") as found:
            saved(mesh, tmp_path / "step")
        return str(found.value)

    monkeypatch.setattr(Path, "exists", seen)
    texts = fs.simulate(work, 3)
    assert [text.endswith("(found on rank 1)") for text in texts] == [True, False, True]
    assert not list(tmp_path.iterdir())


def save_beside_a_suspended_rank(_: fs.Mesh, folder: Path) -> tuple[str, float] | None:
    mesh = fs.init_mesh(device="cpu", patience=0.2, give_up=1.0)
    if mesh.rank == 1:
        (folder / "process").write_text(str(os.getpid()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Writer, "write", lambda _: suspend(mesh))
            saved(mesh, folder / "step")
        return None
    begun = time.monotonic()
    with pytest.raises((OSError, RuntimeError)) as caught:
        saved(mesh, folder / "step")
    os.kill(int((folder / "process").read_text()), signal.SIGKILL)
    return str(caught.value), time.monotonic() - begun


@pytest.mark.slow
def test_a_save_gives_a_suspended_rank_up_long_before_its_timeout(tmp_path: Path) -> None:
    message, seconds = run_ranks(save_beside_a_suspended_rank, 2, tmp_path, may_die={1}, timeout=150)[0]
    assert "rank 1 has given no sign of life for" in message
    assert seconds < 100  # the timeout of a save is 600 seconds


# How a program ends, without its process group, with it and on a full disk, and the exit codes of its ranks.
ENDS = {"closed": [0, 0], "open": [0, 0], "full": [1, 1]}


def program(_: Callable[[], None], folder: Path, how: str, rank: int) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "meeting"), 2), rank=rank, world_size=2)
    mesh, params, write = fs.init_mesh(device="cpu"), {"w": torch.arange(300_000.0)}, Writer.write
    plan = fs.make_plan(params, mesh)

    def slowly(work: Writer) -> None:
        if rank == 1:
            time.sleep(0.5)
            if how == "full":
                raise OSError(28, "No space left on device")
        write(work)

    Writer.write = slowly  # type: ignore[method-assign]
    fs.save(folder / "saved" / "last", {"shards": fs.shard(params, plan, mesh), "step": 7}, plan, mesh, wait=False)
    if how != "open":
        dist.destroy_process_group()


def end_without_waiting(folder: Path) -> dict[str, list[Ended]]:
    ranks = {}
    for how in ENDS:
        (folder / how).mkdir()
        ranks[how] = [
            spawn(program, folder / how, how, rank, log=folder / f"{how}-{rank}", leave=exit_as_an_interpreter)
            for rank in range(2)
        ]
    return {how: wait_all(both, 60.0) for how, both in ranks.items()}


@pytest.mark.slow
@needs_linux
def test_a_program_that_ends_without_waiting_finishes_its_last_checkpoint_or_fails(tmp_path: Path) -> None:
    ended = in_nursery(end_without_waiting, tmp_path, limit=120.0)
    assert {how: [each.code for each in both] for how, both in ended.items()} == ENDS, ended
    for how in ("closed", "open"):
        saved = tmp_path / how / "saved"
        assert fs.latest(saved, thorough=True) == saved / "last"
        assert fs.restore(saved / "last").values == {"step": 7}
        assert os.listdir(saved) == ["last"]
    path = tmp_path / "full" / "saved" / "last"
    message, cause = (each.output for each in ended["full"])
    assert f"checkpoint {path} is not saved: rank 1 could not write its part\n" in message
    assert f"checkpoint {path} is not saved: OSError: [Errno 28] No space left on device\n" in cause
    assert fs.latest(path.parent) is None
