"""Whether the page cache of the system holds a part of a file, without reading it.

``preadv`` with ``RWF_NOWAIT`` reads only what is in the cache, but Linux then also begins to read
the rest into it (seen on 6.18, where a whole file was cached that way).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

import torch

__all__ = ["is_cached"]


def is_cached(file: int, begin: int, end: int) -> bool:
    """Return whether all pages of a part of a file are in the page cache; ``False`` if unknown.

    Arguments:
        file: descriptor of a file that is open for reading.
        begin: index of the first byte, a multiple of the size of a page.
        end: index after the last byte, larger than ``begin``.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     is_cached(file.fileno(), 0, 1)  # the file is empty
        False

    Source: Linux manual pages, mincore(2).
    """
    if (mincore := _mincore()) is None:
        return False
    try:
        mapped = mmap.mmap(file, end - begin, access=mmap.ACCESS_COPY, offset=begin)
    except (OSError, ValueError):  # the file ends earlier, or cannot be mapped
        return False
    pages = torch.empty(-(-(end - begin) // mmap.PAGESIZE), dtype=torch.uint8)
    address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    return mincore(address, end - begin, pages.data_ptr()) == 0 and bool((pages & 1).all())


@functools.cache
def _mincore() -> Callable[..., int] | None:
    """Return the C library's ``mincore``, where there is one."""
    try:
        mincore = ctypes.CDLL(None).mincore
    except (OSError, AttributeError, TypeError):
        return None
    mincore.argtypes, mincore.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p), ctypes.c_int
    return mincore
