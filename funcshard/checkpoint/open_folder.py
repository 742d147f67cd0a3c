"""The folder of a checkpoint, opened once, so that all bytes that are read are of one checkpoint.

A save may give the name of a folder to another one at any moment. An open folder stays the one
that it was, and the files in it are never changed, only deleted. So its reader finds the files of
one checkpoint, or misses one of them and begins again at the path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from funcshard.checkpoint.folders import locate
from funcshard.checkpoint.path_lock import pause

T = TypeVar("T")

# Number of times that a reader begins, if each time another save replaces what it reads.
TRIES = 20


@dataclass(frozen=True, slots=True)
class OpenFolder:
    """A folder that is open for reading.

    Attributes:
        path: its path when it was opened.
        descriptor: the open folder.
    """

    path: Path
    descriptor: int

    @property
    def replaced(self) -> bool:
        """Whether the path names another folder now, or none."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        except FileNotFoundError:
            return True


@contextmanager
def open_folder(path: str | os.PathLike[str]) -> Iterator[OpenFolder]:
    """Open the folder of the checkpoint at a path, for the time of a ``with`` statement.

    Raises:
        FileNotFoundError: there is no folder.
        NotADirectoryError: there is a file.
    """
    folder_path, descriptor = _open(path)
    try:
        yield OpenFolder(folder_path, descriptor)
    finally:
        os.close(descriptor)


def _open(path: str | os.PathLike[str]) -> tuple[Path, int]:
    for attempt in range(TRIES):
        located_path = locate(path)
        try:
            return located_path, os.open(located_path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        except FileNotFoundError:
            # It may have been renamed just now. A path that names nothing three times has none.
            if attempt >= 2 and locate(path) == located_path and not located_path.exists():
                raise
        pause(attempt)
    raise FileNotFoundError(path)


def read_from(path: str | os.PathLike[str], read: Callable[[OpenFolder], T]) -> T:
    """Return what ``read`` makes of a folder; begin again if another save replaces it meanwhile."""
    for attempt in range(TRIES):
        with open_folder(path) as folder:
            try:
                return read(folder)
            except (OSError, ValueError):
                if attempt == TRIES - 1 or not folder.replaced:
                    raise
        pause(attempt)
    raise AssertionError
