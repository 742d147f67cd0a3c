"""What a test may leave behind: open files, and mappings of memory."""

from __future__ import annotations

import contextlib
import gc
import os

__all__ = ["memory_in_use", "open_files"]


def open_files() -> int:
    gc.collect()  # else the garbage of an earlier test may close some between two counts
    return len(os.listdir("/proc/self/fd"))


def memory_in_use() -> set[tuple[str, int]]:
    """Return the memory files that this process has mapped or open, each with its number.

    Why numbers: an earlier test may have left some in this process.
    """
    with open("/proc/self/maps") as maps:
        in_use = {("mapped", int(line.split()[4])) for line in maps if "memfd:funcshard" in line}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread closed it meanwhile
            if "memfd" in os.readlink(f"/proc/self/fd/{name}"):
                in_use.add(("open", os.stat(f"/proc/self/fd/{name}").st_ino))
    return in_use
