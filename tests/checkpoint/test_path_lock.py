"""One process at a time saves to a path; a lock goes with its process, and only a dead one's folders go."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import funcshard as fs
from funcshard.checkpoint import path_lock
from funcshard.checkpoint.path_lock import lock_file, take

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
PLAN, MESH = fs.make_plan({"w": torch.zeros(2)}, 1), fs.Mesh()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def child(work: Callable[[], object]) -> tuple[int, int]:
    """Fork a process that does some work, says so, and sleeps; return its pid and what it said."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, b"y" if work() else b"n")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(write)
    said = os.read(read, 1)
    os.close(read)
    return pid, said == b"y"


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_lock_is_held_by_one_and_leaves_no_file(tmp_path: Path) -> None:
    first = take(tmp_path / "a")
    assert take(tmp_path / "a") is None
    other = take(tmp_path / "b")
    assert names(tmp_path) == [".a.saving", ".b.saving"]
    for lock in (first, other):
        lock.release()
    assert names(tmp_path) == []
    take(tmp_path / "a").release()


def test_a_lock_whose_file_was_removed_does_not_remove_that_of_another(tmp_path: Path) -> None:
    first = take(tmp_path / "a")
    lock_file(tmp_path / "a").unlink()
    second = take(tmp_path / "a")
    first.release()
    assert names(tmp_path) == [".a.saving"]
    assert take(tmp_path / "a") is None
    second.release()
    assert names(tmp_path) == []


def test_a_file_that_its_holder_removed_before_it_was_locked_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = tmp_path / "a", path_lock._flock
    holder, others = take(path), []

    def late(descriptor: int, **options: bool) -> None:
        monkeypatch.undo()
        holder.release()
        others.append(take(path))  # a third save, which makes the file anew
        flock(descriptor, **options)

    monkeypatch.setattr(path_lock, "_flock", late)
    assert take(path) is None
    others[0].release()
    assert names(tmp_path) == []


@forks
def test_a_lock_ends_with_its_process_and_not_with_a_fork_of_it(tmp_path: Path) -> None:
    path = tmp_path / "a"
    pid, took = child(lambda: take(path) is not None)
    try:
        assert took
        assert path_lock.holder_of(path).startswith(f"process {pid} on host ")
        assert take(path) is None
    finally:
        end(pid)
    lock = take(path)
    assert lock is not None
    pid, took = child(lambda: take(path) is not None)  # it has closed its copy, so it cannot keep the lock
    try:
        assert not took
        lock.release()
        again = take(path)
        assert again is not None
        again.release()
    finally:
        end(pid)


@pytest.mark.slow
@forks
def test_an_old_job_beside_its_restart_keeps_what_it_is_saving(tmp_path: Path) -> None:
    path = tmp_path / "step-7"
    pid, took = child(lambda: save_halfway(path))
    try:
        assert took
        before = names(tmp_path)
        words = rf"a checkpoint is already being saved to .*step-7, by process {pid} on host .*: end that job, or choose "
        words += r"another path; if that host is gone and the file system keeps its lock, remove .*/\.step-7\.saving$"
        with pytest.raises(ValueError, match=words):
            fs.save(path, {"step": 7}, PLAN, MESH)
        fs.save(tmp_path / "step-8", {"step": 8}, PLAN, MESH, keep=1)  # which removes what dead processes left
        assert names(tmp_path) == [*before, "step-8"]
    finally:
        end(pid)
    fs.save(tmp_path / "step-9", {"step": 9}, PLAN, MESH, keep=1)
    assert names(tmp_path) == ["step-9"]
    fs.save(path, {"step": 7}, PLAN, MESH)
    assert fs.restore(path).values == {"step": 7}


def save_halfway(path: Path) -> bool:
    """Do what a save does up to the moment before it writes its index."""
    from funcshard.checkpoint.folders import begin_save, part_of

    lock = begin_save(path, "0123abcd")
    (part_of(path, "0123abcd") / "__0_0.distcp").touch()
    return lock is not None


def test_without_locks_in_the_file_system_nothing_counts_as_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(path_lock, "_flock", none)
    for name in (".step-1.0123.part", ".step-2.0123.part"):
        (tmp_path / name).mkdir()
    for step in (1, 2):
        fs.save(tmp_path / f"step-{step}", {"step": step}, PLAN, MESH, keep=1)
    assert names(tmp_path) == [".step-1.0123.part", ".step-2.0123.part", "step-2"]


LEFT = {
    "a part of this name": (".last.0123.part", ["__0_0.distcp", "failed.1"], None, False),
    "one that a rank renamed": (".last.0123abcd-3.part", [".report.0"], None, False),
    "a part of another name": (".step-1.0123.part", ["index.json"], 1, False),
    "a part of another name, where all are kept": (".step-1.0123.part", ["index.json"], None, True),
    "one of an older version": (".step-1.deleted.part", ["sizes.json", ".metadata"], 1, False),
    "a checkpoint that was being replaced": (".step-1.0123.old", ["index.json"], 1, True),
    "the lock of one that was killed when it was complete": (".step-1.saving", '{"host": "a", "process": 3}', 1, False),
    "the lock of one that was killed at once": (".step-1.saving", "", 1, False),
    "another program's file": (".thesis.saving", "precious", 1, True),
    "another program's JSON": (".thesis.saving", '{"title": 3}', 1, True),
    "another program's": (".last.0123.part", ["thesis.tex"], 1, True),
    "another program's of another name": (".wget.0123.part", ["thesis.tex"], 1, True),
    "another program's name": (".last.x.part", [], 1, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEFT)
def test_what_a_dead_process_left_goes_with_the_next_save(name: str, tmp_path: Path) -> None:
    folder, files, keep, stays = LEFT[name]
    if isinstance(files, str):
        (tmp_path / folder).write_text(files)
    else:
        (tmp_path / folder).mkdir()
        for file in files:
            (tmp_path / folder / file).touch()
    fs.save(tmp_path / "last", {"step": 1}, PLAN, MESH, keep=keep)
    assert names(tmp_path) == ([folder] if stays else []) + ["last"]
    assert not (stays and isinstance(files, str)) or (tmp_path / folder).read_text() == files


def test_a_save_waits_for_another_one_that_looks_for_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = take(tmp_path / "last")
    monkeypatch.setattr(path_lock, "pause", lambda tried: held.release() if tried == 3 else None)
    fs.save(tmp_path / "last", {"step": 1}, PLAN, MESH)
    assert names(tmp_path) == ["last"]


def test_a_lock_is_no_link_to_another_file(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("precious")
    lock_file(tmp_path / "last").symlink_to("thesis")
    with pytest.raises(OSError, match=r"last is not saved: .*\.last\.saving"):
        fs.save(tmp_path / "last", {"step": 1}, PLAN, MESH)
    assert (tmp_path / "thesis").read_text() == "precious"


@forks
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
def test_what_belongs_to_another_user_keeps_nobody_from_saving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import torch.distributed.checkpoint  # noqa: F401 (here, because the other user may not see it)

    with tempfile.TemporaryDirectory() as name:  # whose parents the other user sees, unlike those of tmp_path
        folder = Path(name)
        fs.save(folder / "step-0", {"step": 0}, PLAN, MESH)
        (folder / "lost+found").mkdir(0o700)
        (folder / ".step-0.saving").touch(0o600)
        (folder / ".step-1.0123.part").mkdir()
        (folder / ".step-1.saving").touch(0o600)
        folder.chmod(0o777)

        def work() -> bool:
            os.setuid(65534)
            fs.save(folder / "step-2", {"step": 2}, PLAN, MESH, keep=1)
            with pytest.raises(PermissionError):
                fs.restore(folder / "lost+found", PLAN, MESH)
            with pytest.raises(ValueError, match=r"name one of \['step-0', 'step-2'\]"):
                fs.restore(folder)
            return fs.latest(folder) == folder / "step-2"

        pid, found = child(work)
        end(pid)
        assert found
        left = [".step-0.saving", ".step-1.0123.part", ".step-1.saving", "lost+found", "step-0", "step-2"]
        assert names(folder) == left


def test_a_save_that_fails_gives_the_lock_back(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="leaf 'x' of the state cannot be stored"):
        fs.save(tmp_path / "a", {"x": {1}}, PLAN, MESH)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"checkpoint .*/file/a is not saved: .*"):
        fs.save(tmp_path / "file" / "a", {"x": 1}, PLAN, MESH)
    assert not lock_file(tmp_path / "a").exists()
    fs.save(tmp_path / "a", {"x": 1}, PLAN, MESH)
    assert names(tmp_path) == ["a", "file"]
