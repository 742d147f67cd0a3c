"""One process at a time saves to a path; a lock goes with its process, and only a dead one's folders go."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

import funcshard as fs
from funcshard.checkpoint.folders import LOCK, begin_save

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
PLAN, MESH = fs.make_plan({"w": torch.zeros(2)}, 1), fs.Mesh()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextlib.contextmanager
def child(work: Callable[[], object]) -> Iterator[bool]:
    """Fork a process that does some work and lives through the ``with`` block; yield whether the work was true."""
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
    try:
        yield said == b"y"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


LOCKS: list[Any] = []  # because a lock ends with its object


def begin(path: Path) -> Any:
    """Do what a save does up to the moment before it writes its index; return its lock, or ``None``."""
    try:
        LOCKS.append(begin_save(path, "0123abcd"))
    except ValueError:
        return None
    (path / "0123abcd-0.safetensors").touch()
    return LOCKS[-1]


def test_a_folder_that_is_deleted_while_a_save_begins_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, acquire = tmp_path / "a", FileLock.acquire

    def late(lock: FileLock) -> Any:
        monkeypatch.undo()
        taken = acquire(lock)
        shutil.rmtree(path)
        return taken

    monkeypatch.setattr(FileLock, "acquire", late)
    begin(path).release()
    assert names(path) == [LOCK, "0123abcd-0.safetensors", "0123abcd.part"]


@pytest.mark.slow
@forks
def test_a_lock_ends_with_its_process_and_not_with_a_fork_of_it(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with child(lambda: begin(path) is not None) as took:
        assert took
        assert begin(path) is None
    lock = begin(path)
    with child(lambda: begin(path) is not None) as took:  # it has closed its copy, so it cannot keep the lock
        assert not took
        lock.release()
        begin(path).release()


@pytest.mark.slow
@forks
def test_an_old_job_beside_its_restart_keeps_what_it_is_saving(tmp_path: Path) -> None:
    path = tmp_path / "step-7"
    with child(lambda: begin(path) is not None) as took:
        assert took
        before = names(tmp_path)
        words = r"already being saved to .*step-7: pass the Saving .* or end the other job; if .* remove .*/step-7/\.lock$"
        with pytest.raises(ValueError, match=words):
            fs.save(path, {"step": 7}, PLAN, MESH)
        fs.save(tmp_path / "step-8", {"step": 8}, PLAN, MESH, keep=1)  # which removes what dead processes left
        assert names(tmp_path) == [*before, "step-8"]
    fs.save(tmp_path / "step-9", {"step": 9}, PLAN, MESH, keep=1)
    assert names(tmp_path) == ["step-9"]
    fs.save(path, {"step": 7}, PLAN, MESH)
    assert fs.restore(path).values == {"step": 7}


KILLED = ["0123abcd.part", "0123abcd-0.part", "0123abcd-1.safetensors", "0123abcd-1.json", "0123abcd-2.failed", LOCK]
LEFT = {
    "an empty folder": ("last", [], None, False),
    "files of this name": ("last", KILLED, None, False),
    "files of another name": ("step-1", KILLED, 1, False),
    "files of another name, where all are kept": ("step-1", KILLED, None, True),
    "a folder without a lock": ("step-1", ["0123abcd-1.json"], 1, True),
    "another program's": ("wget", [LOCK, "0123abcd-0.safetensors", "thesis.tex"], 1, True),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_a_dead_process_left_goes_with_the_next_save(name: str, tmp_path: Path) -> None:
    folder, files, keep, stays = LEFT[name]
    (tmp_path / folder).mkdir()
    for file in files:
        (tmp_path / folder / file).touch()
    fs.save(tmp_path / "last", {"step": 1}, PLAN, MESH, keep=keep)
    assert names(tmp_path) == ["last", *[folder] * stays]
    assert not stays or names(tmp_path / folder) == sorted(files)
    assert not set(names(tmp_path / "last")) & {*KILLED} - {LOCK}
    assert fs.latest(tmp_path) == tmp_path / "last"


def test_a_lock_is_no_link_to_another_file(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("precious")
    (tmp_path / "last").mkdir()
    (tmp_path / "last" / LOCK).symlink_to("../thesis")
    with pytest.raises(OSError, match=r"last is not saved: .*\.lock"):
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
        (folder / "step-0" / LOCK).chmod(0o600)
        (folder / "step-1").mkdir()
        (folder / "step-1" / LOCK).touch(0o600)
        folder.chmod(0o777)

        def work() -> bool:
            os.setuid(65534)
            fs.save(folder / "step-2", {"step": 2}, PLAN, MESH, keep=1)
            with pytest.raises(PermissionError):
                fs.restore(folder / "lost+found", PLAN, MESH)
            with pytest.raises(ValueError, match=r"name one of \['step-0', 'step-2'\]"):
                fs.restore(folder)
            return fs.latest(folder) == folder / "step-2"

        with child(work) as found:
            assert found
        assert names(folder) == ["lost+found", "step-0", "step-1", "step-2"]


def test_a_save_that_fails_gives_the_lock_back(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="leaf 'x' of the state cannot be stored"):
        fs.save(tmp_path / "a", {"x": {1}}, PLAN, MESH)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"checkpoint .*/file/a is not saved: .*"):
        fs.save(tmp_path / "file" / "a", {"x": 1}, PLAN, MESH)
    assert names(tmp_path) == ["file"]
    fs.save(tmp_path / "a", {"x": 1}, PLAN, MESH)
    assert names(tmp_path) == ["a", "file"]


# --- folders of other libraries ----------------------------------------------------------------

FOLDERS: dict[str, tuple[list[str], str]] = {
    "orbax": (["_METADATA", "_CHECKPOINT_METADATA", "d/x", "manifest.ocdbt"], "of orbax: restore it with orbax"),
    "DeepSpeed": (["latest", "zero_to_fp32.py", "global_step9/x"], r"of DeepSpeed: run its zero_to_fp32\.py"),
    "Lightning": (["epoch=1.ckpt"], "of Lightning: read a file with state_dict = torch.load"),
    "DCP": ([".metadata", "__0_0.distcp"], r"of torch\.distributed\.checkpoint: import_dcp\(path, plan, mesh\)"),
    "Hugging Face": (["config.json", "model.safetensors"], r"import_safetensors\(.*\) takes a file, and from_pretrained"),
    "safetensors": (["x.safetensors"], r"holds 'x\.safetensors', as files of safetensors: import_safetensors"),
    "an old Hugging Face": (["pytorch_model.bin"], r"'pytorch_model\.bin', as a file of torch\.save: write it as "),
    "none": (["notes.txt"], r"its index\.json is missing, so it was not saved to the end"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_restore_says_which_library_wrote_a_folder(case: str, tmp_path: Path) -> None:
    names, words = FOLDERS[case]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=words):
        fs.restore(tmp_path)


@pytest.mark.parametrize("read", [fs.import_dcp, fs.import_safetensors])
def test_other_readers_say_it_too_and_know_ours(read: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").touch()
    with pytest.raises(FileNotFoundError, match=r"it holds 'last\.ckpt', as a checkpoint of Lightning"):
        read(tmp_path, PLAN, MESH)
    fs.save(tmp_path / "x", {"step": 1}, PLAN, MESH)
    with pytest.raises(FileNotFoundError, match=r"save wrote this checkpoint: restore\(path, plan, mesh\) reads it"):
        read(tmp_path / "x", PLAN, MESH)
    (tmp_path / "x" / "index.json").unlink()
    with pytest.raises(ValueError, match=r"its index\.json is missing, so it was not saved to the end"):
        fs.restore(tmp_path / "x")
