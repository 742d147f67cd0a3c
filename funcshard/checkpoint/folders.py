"""Checkpoints as folders: publish one under its name, find and remove them, all safe from crashes.

A folder is a complete checkpoint from the moment its index is in it and it has its final name:

- ``.NAME.TOKEN.part`` is being written or removed, or was when its process was killed;
- ``NAME`` is complete;
- ``.NAME.TOKEN.old`` is the checkpoint that ``NAME`` replaces, where the system cannot exchange two
  names. It counts as ``NAME`` while no folder of that name exists;
- ``.NAME.saving`` is the file of the lock that the process holds which saves to ``NAME``.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import secrets
import shutil
from pathlib import Path

from funcshard._utils import exchange, open_regular
from funcshard.checkpoint.dcp_metadata import METADATA
from funcshard.checkpoint.path_lock import PathLock, name_of_lock, take, take_soon

INDEX, SIZES = "index.json", "sizes.json"
FORMAT, OLD_FORMAT = "funcshard.checkpoint/2", "funcshard.checkpoint/1"

# Of ``.NAME.TOKEN.part``: a rank that cannot even say that it failed adds its number to the token.
_ASIDE = re.compile(r"\.(?P<name>.+)\.([0-9a-f]+(-\d+)?|deleted)\.(part|old)")


def folders(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints in a folder, sorted by name."""
    if not folder.is_dir():
        return []
    # Why the names of folders aside too: one of them may get its final name while this one lists.
    names = {
        name if not name.startswith(".") else _final_name(Path(name)) for name in os.listdir(folder)
    }
    return [path for name in sorted(names) if name and _has_index(path := folder / name)]


def _has_index(path: Path) -> bool:
    """Return whether a folder has an index, or may have one that this process may not see."""
    try:
        # Why twice: what locate has found may get its final name before it is looked at.
        return any((locate(path) / INDEX).exists() for _ in range(2))
    except PermissionError:
        return True


def locate(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a checkpoint: ``path``, or its ``.old`` folder after a crash."""
    path = Path(path).absolute()
    if not path.exists():
        aside = [
            leftover
            for leftover in leftovers(path)
            if leftover.suffix == ".old" and (leftover / INDEX).exists()
        ]
        return aside[0] if aside and not path.exists() else path
    return path


def leftovers(path: Path) -> list[Path]:
    """Return the folders aside that saves to this path, running or interrupted, have beside it."""
    name = glob.escape(path.name)
    beside = [*path.parent.glob(f".{name}.*.part"), *path.parent.glob(f".{name}.*.old")]
    return [leftover for leftover in beside if _final_name(leftover) == path.name]


def begin_save(path: Path, token: str) -> PathLock | None:
    """Take the lock of a path, and make the folder aside that its ranks write into.

    Returns:
        The lock, or ``None`` if another save has it.

    Raises:
        OSError: the folder or the lock's file cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if (lock := take_soon(path)) is None:
        return None
    try:
        part_of(path, token).mkdir()
    except OSError:
        lock.release()
        raise
    return lock


def part_of(path: Path, token: str) -> Path:
    """Return the folder aside of one save to a path."""
    return path.with_name(f".{path.name}.{token}.part")


def check_replaceable(path: Path) -> None:
    """Raise ``ValueError`` if ``path`` holds something that a checkpoint must not replace."""
    if not path.name or path.name.startswith("."):
        raise ValueError(
            "path must end in a name without a dot at its front, because latest passes over "
            f"others; found {path.name!r} in {path}: choose another name"
        )
    obstacle = ""
    if path.is_symlink():
        obstacle = "a link"
    elif path.is_file():
        obstacle = "a file"
    elif path.is_dir() and not has_our_index(path):
        names: list[str] = []
        # Another process may rename it just now, to publish its own.
        with contextlib.suppress(FileNotFoundError):
            names = _foreign(path) or _unproved(path)
        obstacle = f"a folder that holds {names[0]!r}" if names else ""
    if obstacle:
        raise ValueError(
            f"path must be free, or name a checkpoint, which is then replaced; found {obstacle} at "
            f"{path}: choose another path"
        )


def publish(part: Path, path: Path) -> None:
    """Rename the written folder ``part`` to ``path``, and delete the checkpoint it replaces.

    Files of yours in that checkpoint's folder, such as a configuration, move to the new one.
    """
    sync(part)
    # Why again: another program may have written there since the save began.
    check_replaceable(path)
    replaced = None
    if not path.exists():
        os.rename(part, path)
    elif exchange(part, path):
        replaced = part
    else:
        replaced = part.with_suffix(".old")
        os.rename(path, replaced)
        os.rename(part, path)
    sync(path.parent)
    if replaced is not None:
        with contextlib.suppress(OSError):  # it is published; the next save removes what is left
            for name in _foreign(replaced):
                if not (path / name).exists():
                    os.rename(replaced / name, path / name)
            remove(replaced)


def remove(path: Path) -> None:
    """Delete a checkpoint, or a folder aside.

    Raises:
        OSError: the folder cannot be renamed; it may be gone.
    """
    delete(set_aside(path))


def set_aside(path: Path) -> Path:
    """Give a checkpoint or a folder aside a new name as a folder aside, and return it.

    Why before it is deleted: nothing is deleted then that gets its final name meanwhile.
    """
    final = path.with_name(_final_name(path) or path.name)
    aside = part_of(final, secrets.token_hex(4))
    os.rename(path, aside)
    return aside


def delete(aside: Path) -> None:
    """Delete a folder aside, its index first, so that no reader takes the rest for a checkpoint.

    Why ``.metadata`` next: without our files beside it, it marks a checkpoint of another program.
    """
    for name in (INDEX, METADATA):
        with contextlib.suppress(OSError):
            (aside / name).unlink()
    shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(path: Path, lock: PathLock, *, own: str, others: bool) -> None:
    """Delete the folders that saves left whose process has died.

    Arguments:
        path: the path of the save that is running.
        lock: its lock.
        own: the token of that save.
        others: whether to delete those of other paths in the same folder too.
    """
    if not lock.certain:
        return
    dead = _dead(path, [leftover for leftover in leftovers(path) if f".{own}" not in leftover.name])
    dead_by_name: dict[str, list[Path]] = {}
    for leftover in path.parent.iterdir() if others else ():
        if final := _final_name(leftover):
            dead_by_name.setdefault(final, []).append(leftover)
        elif final := name_of_lock(leftover):  # which goes when it is taken and released
            dead_by_name.setdefault(final, [])
    for final in dead_by_name.keys() - {path.name}:
        with contextlib.suppress(OSError):  # such as the lock of another user, which stays
            # If we can take the lock, no save to that path is running.
            if (taken := take(path.with_name(final))) is not None:
                dead += _dead(taken.path, dead_by_name[final])
                taken.release()  # before the folders are deleted, because a save to that path may begin
    for leftover in dead:
        delete(leftover)


def _dead(path: Path, left: list[Path]) -> list[Path]:
    """Set the folders aside of a path, whose lock is held, aside once more; return their names."""
    dead_folders = []
    for leftover in left:
        # Why not an ``.old`` one without a folder of its final name: it is the checkpoint.
        with contextlib.suppress(OSError):
            if (leftover.suffix == ".part" or path.exists()) and not _foreign(leftover):
                dead_folders.append(set_aside(leftover))
    return dead_folders


def discard(part: Path) -> None:
    """Delete the folder of a save that failed, under any name that a rank of it gave to it."""
    for folder in [part, *part.parent.glob(f"{glob.escape(part.stem)}-*.part")]:
        shutil.rmtree(folder, ignore_errors=True)


def sync(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def has_our_index(folder: Path) -> bool:
    """Return whether a folder holds the index of a checkpoint."""
    return _is_ours(folder / INDEX)


def _is_ours(file: Path) -> bool:
    """Return whether a text file is one that this library wrote into a checkpoint."""
    try:
        with open(open_regular(file, links=False), "rb") as opened:
            first = opened.readline(1000)
            return FORMAT.encode() in first or OLD_FORMAT.encode() in first
    except (OSError, ValueError):
        return False


def _foreign(folder: Path) -> list[str]:
    """Return the names in a folder that no part of a checkpoint has, even one deleted in part."""
    names = os.listdir(folder)
    own_names = (INDEX, SIZES, METADATA, f"{METADATA}.tmp")
    foreign = sorted(
        name for name in names if name not in own_names and not _OF_A_RANK.fullmatch(name)
    )
    # Why .metadata alone: torch.distributed.checkpoint gives its files the names of ours.
    return foreign or [METADATA] * (
        METADATA in names and not any(_TEXT.fullmatch(name) for name in names)
    )


def _unproved(folder: Path) -> list[str]:
    """Return the names in a folder without an index, unless a text file there is ours.

    Our names alone prove nothing: other programs write an ``index.json``, or ``__0_0.distcp``.
    """
    names = sorted(os.listdir(folder))
    return [] if any(_TEXT.fullmatch(name) and _is_ours(folder / name) for name in names) else names


_TEXT = re.compile(r"index\.json|sizes\.json|__\d+_0\.json")
_OF_A_RANK = re.compile(r".*\.distcp|__.*_0\.json|\.report\.\d+|failed\.\d+")


def _final_name(path: Path) -> str:
    """Return the final name of a folder aside, ``.NAME.TOKEN.old`` -> ``NAME``, or ``""``."""
    name_match = _ASIDE.fullmatch(path.name)
    return name_match["name"] if name_match else ""
