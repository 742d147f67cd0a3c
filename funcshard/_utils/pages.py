"""Pages of memory: huge ones for disks, and those of mapped files, which a process can give back.

A disk gets a list of page addresses, which has an end: with pages of 4 KiB, a read of 4 MiB becomes
eight, and with huge pages of 2 MiB it's one. Linux gives them if
``/sys/kernel/mm/transparent_hugepage/enabled`` says ``madvise`` or ``always``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections.abc import Callable

import torch

_HUGE_PAGE = 2 << 20  # bytes, on x86, and on ARM with pages of 4 KiB
_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_WIPE_ON_FORK = 18  # of Linux 4.14; Python has no name for it
_DONTNEED: int | None = getattr(mmap, "MADV_DONTNEED", None)


def io_memory(size: int) -> memoryview:
    """Return new memory, from the start of a page, for reads and writes past the page cache."""
    if size >= _HUGE_PAGE and _HUGE is not None:
        huge_memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # an older system, or one whose pages are all small
            # Why: the system copies memory that a fork meets during a read, and the disk would
            # write to the old place. So a forked process gets empty memory, and this one keeps its
            # own.
            huge_memory.madvise(_WIPE_ON_FORK)
            # The mapping is longer by one page, so that a huge page can begin inside it.
            begin = -torch.frombuffer(huge_memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
            huge_memory.madvise(_HUGE, begin, size // _HUGE_PAGE * _HUGE_PAGE)
            return memoryview(huge_memory)[begin : begin + size]
    return memoryview(mmap.mmap(-1, size))  # shared with forked processes


def release_pages(tensor: torch.Tensor) -> None:
    """Take a tensor's pages out of this process's memory, if it lies inside a mapped file.

    They stay in the system's page cache, and reading maps them again.

    Arguments:
        tensor: a view of a mapped file that's never written to, behind its first byte, or any other
            tensor.

    Source: Linux manual pages, madvise(2).
    """
    storage_begin = tensor.untyped_storage().data_ptr()
    if tensor.data_ptr() == storage_begin or not tensor.nbytes or _DONTNEED is None:
        return
    if (madvise := _madvise()) is not None:
        begin = max(tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE, storage_begin)
        madvise(begin, tensor.data_ptr() + tensor.nbytes - begin, _DONTNEED)


@functools.cache
def _madvise() -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
