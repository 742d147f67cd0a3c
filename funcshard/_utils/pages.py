"""Pages of mapped files, which a process can give back."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

import torch

_DONTNEED: int | None = getattr(mmap, "MADV_DONTNEED", None)


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
