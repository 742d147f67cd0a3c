"""Peak resident memory of this process, as Linux counts it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Peak", "measured"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt's numbers for them


class Peak:
    """The most memory resident since ``reset``, above what there was before.

    Attributes:
        bytes: the result, once the ``with`` block has ended; ``None`` where the system does not say.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        self.before = _status("VmRSS")

    def reset(self) -> None:
        """Forget what came before."""
        gc.collect()
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")  # sets the high-water mark to what is resident now


@contextlib.contextmanager
def measured() -> Iterator[Peak]:
    """Measure the block's peak; freed memory goes back to the system at once while this process lives."""
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 1 << 16)
        libc.mallopt(_TRIM_THRESHOLD, 1 << 16)
        libc.malloc_trim(0)
    peak = Peak()
    yield peak
    after = _status("VmHWM")
    if peak.before is not None and after is not None:
        peak.bytes = after - peak.before


def _status(key: str) -> int | None:
    if not _STATUS.exists():
        return None
    found = re.search(rf"^{key}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
