"""Checkpoints as folders: publish one under its name, find and remove them, all safe from crashes.

A folder is a complete checkpoint from the moment its index is in it and it has its final name:

- ``.NAME.TOKEN.part`` is being written, or was when its writer was killed;
- ``NAME`` is complete;
- ``.NAME.TOKEN.old`` is the checkpoint that ``NAME`` replaces. It counts as ``NAME`` while no
  folder of that name exists, which is so between the two renames of ``publish``;
- ``.NAME.deleted.part`` is being removed.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from pathlib import Path

from funcshard._utils import open_regular

__all__ = [
    "FORMAT", "INDEX", "OLD_FORMAT", "SIZES", "check_replaceable", "folders", "has_our_index", "leftovers", "locate",
    "publish", "remove", "sync",
]  # fmt: skip

INDEX, SIZES = "index.json", "sizes.json"
FORMAT, OLD_FORMAT = "funcshard.checkpoint/2", "funcshard.checkpoint/1"


def folders(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints in a folder, sorted by name."""
    if not folder.is_dir():
        return []
    aside = {_final_name(path) for path in folder.glob(".*.old") if (path / INDEX).exists()}
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".") and (path / INDEX).exists()}
    return [folder / name for name in sorted(names | {name for name in aside if not (folder / name).exists()})]


def locate(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a checkpoint: ``path``, or its ``.old`` folder after a crash."""
    path = Path(path).absolute()
    if not path.exists():
        aside = [left for left in leftovers(path) if left.suffix == ".old"]
        return aside[0] if aside else path
    return path


def leftovers(path: Path) -> list[Path]:
    """Return the folders that interrupted saves of this path left beside it."""
    name = glob.escape(path.name)
    beside = [*path.parent.glob(f".{name}.*.part"), *path.parent.glob(f".{name}.*.old")]
    return [left for left in beside if _final_name(left) == path.name]


def check_replaceable(path: Path) -> None:
    """Raise ``ValueError`` if ``path`` holds something that a checkpoint must not replace."""
    found = ""
    if path.is_symlink():
        found = "a link"
    elif path.is_file():
        found = "a file"
    elif path.is_dir() and not has_our_index(path):
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError):  # another process renamed it just now, to publish its own
            names = sorted(os.listdir(path))
        # A checkpoint that was deleted in part holds no other files than these.
        foreign = [name for name in names if name not in (INDEX, SIZES, ".metadata") and not _is_of_a_rank(name)]
        found = f"a folder that holds {foreign[0]!r}" if foreign else ""
    if found:
        raise ValueError(
            f"path must be free, or name a checkpoint, which is then replaced; found {found} at {path}: choose another path"
        )


def publish(part: Path, path: Path) -> None:
    """Rename the written folder ``part`` to ``path``, and delete the checkpoint it replaces."""
    sync(part)
    old = part.with_suffix(".old")
    if path.exists():
        os.rename(path, old)
    os.rename(part, path)
    sync(path.parent)
    remove(old)


def remove(path: Path) -> None:
    """Delete a checkpoint.

    The folder is renamed first, and loses its index before its other files, so that no reader takes
    the rest for a complete checkpoint.
    """
    if not path.name.startswith("."):
        aside = path.with_name(f".{path.name}.deleted.part")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)
        path = aside
    (path / INDEX).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def sync(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def has_our_index(folder: Path) -> bool:
    """Return whether a folder holds the index of a checkpoint."""
    try:
        with open(open_regular(folder / INDEX, links=False), "rb") as file:
            first = file.readline(1000)
            return FORMAT.encode() in first or OLD_FORMAT.encode() in first
    except (OSError, ValueError):
        return False


def _is_of_a_rank(name: str) -> bool:
    """Return whether a file has the name of a rank's tensors or of its table."""
    return name.endswith(".distcp") or (name.startswith("__") and name.endswith("_0.json"))


def _final_name(path: Path) -> str:
    """Return the final name of a checkpoint: ``.NAME.TOKEN.old`` -> ``NAME``."""
    return path.name[1:].rsplit(".", 2)[0]
