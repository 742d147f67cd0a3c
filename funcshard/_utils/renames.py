"""Exchange the names of two folders in one step, where the system can."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
_UNKNOWN = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two files or folders; return ``False`` where the system cannot.

    At no moment does one of the names not exist.

    Raises:
        OSError: one of them does not exist, or may not be renamed.

    Source: Linux manual pages, renameat2(2).
    """
    if (rename := _renameat2()) is None:
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    if (error := ctypes.get_errno()) in _UNKNOWN:
        return False
    raise OSError(error, os.strerror(error), str(one), None, str(other))


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):  # not Linux, or a C library from before 2018
        return None
    function.argtypes = (
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_uint,
    )
    function.restype = ctypes.c_int
    return function
