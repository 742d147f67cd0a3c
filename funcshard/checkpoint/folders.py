"""The folder of a checkpoint.

A save writes its files beside those of the checkpoint that it replaces. ``os.replace`` of the index
makes them the checkpoint, so at any moment there's the old one, the new one, or none:

- ``index.json`` names the save whose files are the checkpoint;
- ``TOKEN-RANK.safetensors`` and ``TOKEN-RANK.json`` are the files of a rank;
- ``TOKEN.part`` and ``TOKEN-RANK.part`` are incomplete;
- ``TOKEN-RANK.failed`` tells rank 0 that a rank couldn't write its part;
- ``.lock`` is locked by the process that saves, until it ends.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from funcshard._utils.regular_files import open_regular
from funcshard.checkpoint.rank_files import FORMAT, INDEX

StrPath = str | os.PathLike[str]

LOCK = ".lock"

# Number of times that a reader or a lock begins again if another process replaces what it found.
TRIES = 20

_OF_A_SAVE = re.compile(r"(?P<save>[0-9a-f]{8})(-\d+)?\.(safetensors|json|part|failed)")


def folders(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints in a folder, sorted by name."""
    if not folder.is_dir():
        return []
    return [
        path
        for path in sorted(folder.iterdir())
        if path.name[0] != "." and _has_index(path)
    ]


def _has_index(path: Path) -> bool:
    """Return whether a folder has an index, or may have one that you may not see."""
    try:
        return (path / INDEX).exists()
    except PermissionError:
        return True


def has_our_index(folder: Path) -> bool:
    """Return whether a folder holds the index of a checkpoint."""
    return FORMAT.encode() in start_of_index(folder).partition(b"\n")[0]


def start_of_index(folder: Path) -> bytes:
    """Return the first bytes of an index, or none if it can't be read."""
    try:
        with open(open_regular(folder / INDEX, links=False), "rb") as opened:
            return opened.read(1000)
    except (OSError, ValueError):
        return b""


def check_replaceable(path: Path) -> None:
    """Raise ``ValueError`` if ``path`` holds something that a checkpoint must not replace."""
    if not path.name or path.name.startswith("."):
        raise ValueError(
            "path must end in a name without a dot at its front, because latest passes over "
            f"others; found {path.name!r} in {path}: choose another name"
        )
    obstacle_text = ""
    if path.is_symlink():
        obstacle_text = "a link"
    elif path.is_file():
        obstacle_text = "a file"
    elif path.is_dir() and not has_our_index(path) and (names := foreign_names(path)):
        obstacle_text = f"a folder that holds {names[0]!r}"
    if obstacle_text:
        raise ValueError(
            f"path must be free, or name a checkpoint, which is then replaced; found {obstacle_text} at "
            f"{path}: choose another path"
        )


def foreign_names(folder: Path) -> list[str]:
    """Return the names in a folder that no unfinished save leaves there."""
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError):  # another job deleted it just now
        names = sorted(os.listdir(folder))
    return [name for name in names if name != LOCK and not _OF_A_SAVE.fullmatch(name)]


def begin_save(path: Path, save: str) -> FileLock:
    """Make a checkpoint's folder, and take its lock.

    Raises:
        ValueError: another save has the lock.
        OSError: the folder or its files can't be made.
    """
    for _ in range(TRIES):
        # Why half a second: a save that deletes old checkpoints has the lock for a moment. Why not
        # thread-local: the thread that writes releases it.
        lock = FileLock(path / LOCK, timeout=0.5, thread_local=False)
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Note: the system gives it back when the process ends in any way.
            lock.acquire()
            (path / f"{save}.part").touch()
        except Timeout:
            raise ValueError(
                f"a checkpoint is already being saved to {path}: pass the Saving that save returned as "
                f"after=, or end the other job; if its host is gone and the file system keeps its lock, "
                f"remove {path / LOCK}"
            ) from None
        except FileNotFoundError:
            lock.release()  # the other save has deleted the folder just now
        except OSError as error:
            lock.release()
            discard(path, save)
            raise OSError(f"checkpoint {path} is not saved: {error}") from error
        else:
            return lock
    raise FileNotFoundError(path)


def publish(path: Path, save: str) -> None:
    """Make the files of a save the checkpoint; its index is in ``SAVE.part``."""
    check_replaceable(
        path
    )  # again: another program may have written there since the save began
    sync(path)
    # Note: a crash of the host must not keep the index and lose files that it stands for.
    os.replace(path / f"{save}.part", path / INDEX)
    # Why before old files go: a crash of the host could bring the old index back.
    # Note: the name of a new folder lies in its parent.
    sync(path)
    sync(path.parent)
    remove_files(path, lambda other: other != save)


def remove_files(path: Path, is_dead: Callable[[str], bool]) -> None:
    """Delete the files of the saves that ``is_dead`` is true of."""
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            # Note: files of other programs never match, and stay.
            name_match = _OF_A_SAVE.fullmatch(name)
            if name_match and is_dead(name_match["save"]):
                with contextlib.suppress(OSError):
                    (path / name).unlink()


def discard(path: Path, save: str) -> None:
    """Delete the files of a failed save, and the folder if it's empty then."""
    remove_files(path, lambda other: other == save)
    remove_unfinished(path)
    with contextlib.suppress(OSError):  # if the disk had no room for a lock
        path.rmdir()


def remove_unfinished(path: Path) -> None:
    """Delete a folder with files of killed saves and no index, unless a save is running."""
    if _has_index(path):  # first: a save to a checkpoint beside this one may want its lock
        return
    # Note: filelock's Timeout is an OSError, so a running save keeps its folder.
    with contextlib.suppress(OSError), locked(path):
        if not _has_index(path) and not foreign_names(path):
            delete(path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a checkpoint; raise ``OSError`` if a save is running or there's no lock."""
    # Why: FileLock would make the file, and with it a folder that is no checkpoint.
    if not (path / LOCK).exists():
        raise FileNotFoundError(path / LOCK)
    with FileLock(path / LOCK, timeout=0, thread_local=False):
        yield


def delete(path: Path) -> None:
    """Delete a checkpoint, its index first."""
    # Note: rmtree deletes in any order, and a kill may come between.
    (path / INDEX).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def sync(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def pause(attempt: int) -> None:
    """Wait before the next try, longer each time: 1 ms, 2 ms, up to 0.1 s."""
    time.sleep(min(0.001 * 2**attempt, 0.1))


# --- folders of other libraries -----------------------------------------------------------------

_SHARDS = "shards = from_state_dict(state_dict, plan, mesh)"
_REWRITE = "write it as safetensors with transformers, as in AutoModelForCausalLM.from_pretrained(folder"

# Names that a library writes, as patterns, and how to read its folder. The first one counts.
_FOLDERS = {
    "adapter_config.json": (
        "an adapter of peft, without its model: to train on, give "
        "peft.PeftModel.from_pretrained(model, folder, is_trainable=True) to make_functional; for "
        "one model, call its merge_and_unload().save_pretrained(another_folder)"
    ),
    "snapshots": (
        "a cache of the hub: pass the folder that huggingface_hub.snapshot_download(name) returns"
    ),
    "_CHECKPOINT_METADATA _METADATA manifest.ocdbt": (
        "a checkpoint of orbax: restore it with orbax.checkpoint, convert its arrays with "
        f"torch.from_numpy, and call {_SHARDS}"
    ),
    "zero_to_fp32.py *_model_states.pt *_optim_states.pt": (
        "a checkpoint of DeepSpeed: run its zero_to_fp32.py, which writes one file of the state "
        f"dict, and call {_SHARDS}"
    ),
    "*.ckpt": (
        "a checkpoint of Lightning: read a file with state_dict = torch.load(file, "
        f"weights_only=True)['state_dict'], and call {_SHARDS}"
    ),
    ".metadata": (
        "a checkpoint of torch.distributed.checkpoint: import_dcp(path, plan, mesh) reads the "
        "parameters and the optimizer state"
    ),
    "*.gguf": f"a file of GGUF: {_REWRITE}, gguf_file=name).save_pretrained(another_folder)",
    "pytorch_model*.bin": f"a file of torch.save: {_REWRITE}).save_pretrained(another_folder)",
    "*.safetensors *.safetensors.index.json": (
        "files of safetensors: import_safetensors(path, plan, mesh) takes a file, and "
        "from_pretrained(path, mesh) a folder of Hugging Face"
    ),
}


def what_it_holds(folder: Path, otherwise: str = "") -> str:
    """Return the end of an error about a folder: what it holds, and how to read that.

    If no library is known to write such a folder, this is ``otherwise``, or its first names.
    """
    if has_our_index(folder):
        return "save wrote this checkpoint: restore(path, plan, mesh) reads it"
    file_names = foreign_names(folder)
    for patterns, remedy in _FOLDERS.items():
        for pattern in patterns.split():
            if matching_names := fnmatch.filter(file_names, pattern):
                return f"it holds {matching_names[0]!r}, as {remedy}"
    return otherwise or (f"it holds {file_names[:3]}" if file_names else "it is empty")
