"""Memory in huge pages: one page fault for 2 MiB, and one address for the disk.

New memory costs a page fault for every 4 KiB, which takes longer than writing to it. A disk gets a
list with the address of each page, and the list has an end: with small pages, a read of 4 MiB
becomes several. Linux gives huge pages where a program asks for them, if
``/sys/kernel/mm/transparent_hugepage/enabled`` says ``madvise`` or ``always``. On other systems
these functions change nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections.abc import Callable

import torch

__all__ = ["HUGE_PAGE", "hugely_paged", "io_memory"]

HUGE_PAGE = 2 << 20  # bytes, on x86, and on ARM with pages of 4 KiB
_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_WIPE_ON_FORK = 18  # of Linux 4.14; Python has no name for it


def hugely_paged(tensor: torch.Tensor) -> torch.Tensor:
    """Ask for huge pages for the memory of a new tensor, and return the tensor.

    Call it before the first write, and only if all elements will be written: a huge page is in
    memory as a whole. Pages at the ends, which hold other data too, stay small.

    Example:
        >>> import torch
        >>> hugely_paged(torch.empty(1 << 20)).numel()
        1048576
    """
    if tensor.device.type != "cpu" or tensor.nbytes < 2 * HUGE_PAGE or (madvise := _madvise()) is None:
        return tensor
    begin = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE * HUGE_PAGE
    madvise(begin, end - begin, _HUGE)  # it fails only on a system without huge pages
    return tensor


def io_memory(size: int) -> memoryview:
    """Return new memory for reads and writes past the page cache; it begins at a page.

    A process that is forked meanwhile does not disturb them: the system would copy other memory
    that a fork meets during a read, and the disk would write to the old place.

    Example:
        >>> len(io_memory(5 << 20))
        5242880
    """
    if size >= HUGE_PAGE and _HUGE is not None:
        memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            memory.madvise(_WIPE_ON_FORK)  # a forked process gets empty memory, and this one keeps its own
            begin = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
            with contextlib.suppress(OSError):
                memory.madvise(_HUGE, begin, -(-size // HUGE_PAGE) * HUGE_PAGE)
            return memoryview(memory)[begin : begin + size]
    return memoryview(mmap.mmap(-1, size))  # shared with forked processes


@functools.cache
def _madvise() -> Callable[..., int] | None:
    """Return the C library's ``madvise``, where it knows of huge pages."""
    if _HUGE is None:
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return madvise  # type: ignore[no-any-return]
