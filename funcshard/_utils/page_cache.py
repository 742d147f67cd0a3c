"""Pages of mapped files, which count as memory of this process until it gives them back."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

import torch

_DONTNEED: int | None = getattr(mmap, "MADV_DONTNEED", None)


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
    if (madvise := _madvise()) is not None:
        begin = max(tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE, storage)
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
