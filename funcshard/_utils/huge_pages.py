"""Memory that a disk reads into and writes from: in huge pages, where the system has them.

A disk gets a list with the address of each page, and the list has an end: with pages of 4 KiB, a
read of 4 MiB becomes eight. With huge pages of 2 MiB it is one. Linux gives them where a program
asks for them, if ``/sys/kernel/mm/transparent_hugepage/enabled`` says ``madvise`` or ``always``.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

_HUGE_PAGE = 2 << 20  # bytes, on x86, and on ARM with pages of 4 KiB
_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_WIPE_ON_FORK = 18  # of Linux 4.14; Python has no name for it


def io_memory(size: int) -> memoryview:
    """Return new memory for reads and writes past the page cache; it begins at a page.

    A process that is forked meanwhile does not disturb them: the system would copy other memory
    that a fork meets during a read, and the disk would write to the old place.

    Example:
        >>> len(io_memory(5 << 20))
        5242880
    """
    if size >= _HUGE_PAGE and _HUGE is not None:
        memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # an older system, or one whose pages are all small
            # A forked process gets empty memory, and this one keeps its own.
            memory.madvise(_WIPE_ON_FORK)
            begin = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
            memory.madvise(_HUGE, begin, size // _HUGE_PAGE * _HUGE_PAGE)
            return memoryview(memory)[begin : begin + size]
    return memoryview(mmap.mmap(-1, size))  # shared with forked processes
