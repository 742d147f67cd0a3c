"""Measure the peak resident memory of this process on Linux, with shared memory counted once.

A shared page is resident in every process that maps it, so the sum over ranks would count it once
for each rank. The kernel also reports a process's share of such pages (``Pss_Shmem``: a page that
three processes map counts a third in each). So the memory of a process is its resident memory, with
that share instead of all its shared memory. The kernel keeps a high-water mark of resident memory,
which misses no peak. It keeps none of shared memory, so the overcount is taken before and after the
measured time, and the smaller of the two is subtracted.

The C library keeps much of the freed memory. So that the memory in use is measured, it has to return
freed blocks to the system at once, all but small ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Iterator
from pathlib import Path

_STATUS, _PARTS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/smaps_rollup"), Path("/proc/self/clear_refs")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameter numbers of mallopt


class Peak:
    """The highest resident memory since ``reset``, minus the resident memory at construction.

    ``bytes`` has it after the ``with`` block has ended; ``None`` if the system does not report it.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._resident, self._over = _kilobytes(_STATUS, "VmRSS"), _overcounted()
        self._reset = self._over

    def reset(self) -> None:
        """Set the high-water mark to the memory that is resident now."""
        gc.collect()
        self._reset = _overcounted()
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")

    def _end(self) -> None:
        highest, over = _kilobytes(_STATUS, "VmHWM"), _overcounted()
        if None not in (highest, over, self._resident, self._over, self._reset):
            self.bytes = 1024 * (highest - min(over, self._reset) - (self._resident - self._over))


@contextlib.contextmanager
def measured() -> Iterator[Peak]:
    """Measure the block's peak; freed memory is returned at once, for the process's life."""
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 1 << 16)
        libc.mallopt(_TRIM_THRESHOLD, 1 << 16)
        libc.malloc_trim(0)
    peak = Peak()
    yield peak
    peak._end()


def _overcounted() -> int | None:
    """Return the kilobytes of resident shared memory that count as other processes' share."""
    whole, part = _kilobytes(_STATUS, "RssShmem"), _kilobytes(_PARTS, "Pss_Shmem")
    return None if whole is None or part is None else whole - part


def _kilobytes(file: Path, key: str) -> int | None:
    if not file.exists():
        return None
    found = re.search(rf"^{key}:\s+(\d+) kB", file.read_text(), re.MULTILINE)
    return int(found[1]) if found else None
