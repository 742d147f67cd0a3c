"""Peak resident memory of this process, as Linux counts it, with memory that processes share counted once.

A shared page is resident in every process that has it mapped, so the sum over ranks would count it once a rank. The kernel
also tells a process's part of such pages (``Pss_Shmem``: a page that three processes have mapped counts a third in each).
So a process's memory is its resident memory, with that part in the place of all its shared memory. The system keeps a
high-water mark of the former, which misses nothing; shared memory is taken at the beginning and at the end of the time
measured, and what is taken off is the smaller of the two overcounts.

The C library keeps much of what is freed, so that a process has more memory than its tensors. Whoever asks what is in use at
a time lets it give back at once what it can, all blocks but small ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Peak", "measured"]

_STATUS, _PARTS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/smaps_rollup"), Path("/proc/self/clear_refs")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt's numbers for them


class Peak:
    """The most memory resident since ``reset``, above what there was before.

    Attributes:
        bytes: the result, once the ``with`` block has ended; ``None`` where the system does not say.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._resident, self._over = _kilobytes(_STATUS, "VmRSS"), _overcounted()
        self._reset = self._over

    def reset(self) -> None:
        """Forget what came before."""
        gc.collect()
        self._reset = _overcounted()
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")  # sets the high-water mark to what is resident now

    def _end(self) -> None:
        highest, over = _kilobytes(_STATUS, "VmHWM"), _overcounted()
        if None not in (highest, over, self._resident, self._over, self._reset):
            self.bytes = 1024 * (highest - min(over, self._reset) - (self._resident - self._over))


@contextlib.contextmanager
def measured(*, give_back: bool = False) -> Iterator[Peak]:
    """Measure the block's peak; with ``give_back``, freed memory goes back at once, while this process lives."""
    if give_back:
        with contextlib.suppress(AttributeError, OSError):
            libc = ctypes.CDLL(None)
            libc.mallopt(_MMAP_THRESHOLD, 1 << 16)
            libc.mallopt(_TRIM_THRESHOLD, 1 << 16)
            libc.malloc_trim(0)
    peak = Peak()
    yield peak
    peak._end()


def _overcounted() -> int | None:
    """Kilobytes of resident shared memory that are other processes' part."""
    whole, part = _kilobytes(_STATUS, "RssShmem"), _kilobytes(_PARTS, "Pss_Shmem")
    return None if whole is None or part is None else whole - part


def _kilobytes(file: Path, key: str) -> int | None:
    if not file.exists():
        return None
    found = re.search(rf"^{key}:\s+(\d+) kB", file.read_text(), re.MULTILINE)
    return int(found[1]) if found else None
