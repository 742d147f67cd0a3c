"""A lock on the path of a checkpoint: one process at a time writes there, and no lock outlives it.

The lock is a ``flock`` on a file beside the path, ``.NAME.saving``. The system takes it back when
the process ends in any way, so a lock that can be taken proves that no save is running. On NFS it
holds between hosts too. Why no lease that is renewed: clocks of hosts differ, and a process that
was stopped for longer than its lease would go on writing when it wakes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funcshard._utils import file_data, read_regular

# Why no link: the words that are written into the file would replace those of another one.
_FLAGS: int = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class PathLock:
    """The lock of a path, held by this process.

    Attributes:
        path: the path.
        descriptor: the open file that the lock is on.
        certain: whether it is one. Some file systems have no locks; then no other process is kept
            away, and nothing proves that a folder beside the path is a dead process's.
    """

    path: Path
    descriptor: int
    certain: bool

    def release(self) -> None:
        """Give the lock back, and remove its file."""
        _HELD.discard(self)
        file = lock_file(self.path)
        with contextlib.suppress(OSError):
            # If not, somebody removed it, and another process may have made this one.
            if _is_open_as(file, self.descriptor):
                os.unlink(file)  # first: a process that opened it looks whether it is still there
        if self.certain:
            with contextlib.suppress(OSError):
                _flock(self.descriptor, unlock=True)
        os.close(self.descriptor)


def lock_file(path: Path) -> Path:
    """Return the file that the lock of a path is on."""
    return path.with_name(f".{path.name}.saving")


def take(path: Path) -> PathLock | None:
    """Take the lock of a path and return it, or return ``None`` if another save has it.

    Raises:
        OSError: its file cannot be made.
    """
    file = lock_file(path)
    while True:
        descriptor = os.open(file, _FLAGS, 0o666)
        certain = True
        try:
            _flock(descriptor)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                os.close(descriptor)
                return None
            certain = False
        if not certain or _is_open_as(file, descriptor):
            break
        os.close(descriptor)  # its last holder has removed this file
    with contextlib.suppress(OSError):  # only words for other processes
        os.ftruncate(descriptor, 0)
        os.pwrite(
            descriptor,
            json.dumps({"host": socket.gethostname(), "process": os.getpid()}).encode(),
            0,
        )
    lock = PathLock(path, descriptor, certain)
    _HELD.add(lock)
    return lock


def take_soon(path: Path) -> PathLock | None:
    """Do the same, but try for half a second.

    A save that deletes old checkpoints and leftovers has the lock of each one for a moment.
    """
    for attempt in range(11):
        if (lock := take(path)) is not None:
            return lock
        pause(attempt)
    return None


def holder_of(path: Path) -> str:
    """Return the process that holds the lock of a path, as text."""
    try:
        holder_text = _words(lock_file(path))
        return (
            f"process {holder_text['process']} on host {holder_text['host']}"
            if holder_text
            else "another process"
        )
    except (OSError, ValueError):
        return "another process"


def name_of_lock(file: Path) -> str:
    """Return the name of the checkpoint that a file is the lock of; ``""`` if it is none."""
    if not (file.name.startswith(".") and file.suffix == ".saving"):
        return ""
    try:
        _words(file)
    except (OSError, ValueError):
        return ""
    return file.stem[1:]


def _words(file: Path) -> dict[str, Any]:
    """Return what ``take`` wrote into a file; nothing if its process was killed before that.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
    """
    data = read_regular(file, most=1000, links=False)
    holder_fields = file_data.table(
        "the file", file_data.parse(data) if data else {}, others=False, later=("host", "process")
    )
    if holder_fields:
        file_data.text("host", holder_fields.get("host"))
        file_data.whole("process", holder_fields.get("process"))
    return holder_fields


def pause(tried: int) -> None:
    """Wait before the next try, longer each time: 1 ms, 2 ms, up to 0.1 s."""
    time.sleep(min(0.001 * 2**tried, 0.1))


def _flock(descriptor: int, *, unlock: bool = False) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    fcntl.flock(descriptor, fcntl.LOCK_UN if unlock else fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_open_as(file: Path, descriptor: int) -> bool:
    """Return whether an open file is the one that has this name now."""
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False


# Why this registry, and only this one: a process that is forked during a save inherits the open
# file, and the lock would outlive the save's process in it. Children close their copies.
_HELD: weakref.WeakSet[PathLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_HELD):
        os.close(lock.descriptor)
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
