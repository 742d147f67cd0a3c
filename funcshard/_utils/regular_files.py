"""Open files for reading, if they are regular ones, and give pages of mapped files back.

A named pipe, or a device such as ``/dev/zero``, would be read for ever.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import stat
from collections.abc import Callable

import torch

_KINDS = {
    stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link",
}  # fmt: skip

# Why not to wait: a pipe may take the place of the file between the look at it and its opening.
_FLAGS: int = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_NO_LINKS: int = getattr(os, "O_NOFOLLOW", 0)


def open_regular(path: str | os.PathLike[str], *, links: bool = True) -> int:
    """Return the descriptor of a regular file, which the caller closes, or raise ``ValueError``.

    Arguments:
        links: whether the path itself may be a symbolic link.
    """
    # Why before: opening a device may do something.
    regular_size(path, links=links)
    descriptor = os.open(path, _FLAGS if links else _FLAGS | _NO_LINKS)
    try:
        _check(path, os.fstat(descriptor).st_mode)
        # Only its opening must not wait; reads may.
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(
    path: str | os.PathLike[str], *, most: int | None = None, links: bool = True
) -> bytes:
    """Return the bytes of a regular file of at most ``most``; raise ``ValueError`` for others."""
    with open(open_regular(path, links=links), "rb") as file:
        file_size = os.fstat(file.fileno()).st_size
        if most is not None and file_size > most:
            raise ValueError(
                f"{os.fspath(path)} has {file_size} bytes, and such a file has at most {most}: it "
                "is damaged"
            )
        return file.read()


def regular_size(path: str | os.PathLike[str], *, links: bool = True) -> int:
    """Return the number of bytes of a regular file, which isn't opened."""
    file_status = os.stat(path, follow_symlinks=links)
    _check(path, file_status.st_mode)
    return file_status.st_size


def _check(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        file_kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        remedy = "remove it"
        if stat.S_ISLNK(mode):
            remedy = "copy the folder with its files in place of links, as cp -rL does"
        raise ValueError(
            f"{os.fspath(path)} must be a regular file; found {file_kind}: {remedy}"
        )


# --- mapped files ---------------------------------------------------------------------------------


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
        # Why rounded down: madvise takes the address of a page.
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
