"""Pages of files: which are in memory, and which of them count as memory of this process.

``is_cached`` asks without reading. ``preadv`` with ``RWF_NOWAIT`` reads only what is in the cache,
but Linux then also begins to read the rest into it. On Linux 6.18, a whole file came into the cache
that way.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

import torch

_DONTNEED: int | None = getattr(mmap, "MADV_DONTNEED", None)


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
    if (mincore := _of_libc("mincore", ctypes.c_void_p)) is None:
        return False
    try:
        mapped = mmap.mmap(file, end - begin, access=mmap.ACCESS_COPY, offset=begin)
    except (OSError, ValueError):  # the file ends earlier, or cannot be mapped
        return False
    pages = torch.empty(-(-(end - begin) // mmap.PAGESIZE), dtype=torch.uint8, device="cpu")
    address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    return mincore(address, end - begin, pages.data_ptr()) == 0 and bool((pages & 1).all())


def release_pages(tensor: torch.Tensor) -> None:
    """Take the pages of a tensor out of this process's memory, if it lies inside a mapped file.

    The system has them in its page cache, as long as it has nothing better to keep there. Reading
    the tensor again maps them again.

    Arguments:
        tensor: a tensor in separate memory, or a view of a mapped file that is never written to,
            behind the file's first byte.

    Source: Linux manual pages, madvise(2).
    """
    storage = tensor.untyped_storage().data_ptr()
    if tensor.data_ptr() == storage or not tensor.nbytes or _DONTNEED is None:
        return
    if (madvise := _of_libc("madvise", ctypes.c_int)) is not None:
        begin = max(tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE, storage)
        madvise(begin, tensor.data_ptr() + tensor.nbytes - begin, _DONTNEED)


@functools.cache
def _of_libc(name: str, last: type) -> Callable[..., int] | None:
    """Return a function of the C library on an address, a size and a ``last`` argument."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, last), ctypes.c_int
    return function
