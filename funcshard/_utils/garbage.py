"""``without_collection``: code that makes many objects, and lets Python look for garbage later."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


class _Blocks:
    """The blocks of all threads that run, because Python has one switch for all of them."""

    lock = threading.Lock()
    number = 0
    enabled = True  # before the first of them


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Run the ``with`` block without searches for garbage in cycles.

    Python starts such a search after a number of new objects, and each one walks through all
    objects. A model of 80,000 modules has a million of them, so half of the time that its trace
    takes would be such searches. Objects outside of cycles are freed at once, as always. After the
    last block of all threads, also after an error, searches go on if they were on before.

    Example:
        >>> import gc
        >>> from funcshard._utils.garbage import without_collection
        >>> with without_collection():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    with _Blocks.lock:
        if not _Blocks.number:
            _Blocks.enabled = gc.isenabled()
        _Blocks.number += 1
        gc.disable()
    try:
        yield
    finally:
        with _Blocks.lock:
            _Blocks.number -= 1
            if not _Blocks.number and _Blocks.enabled:
                gc.enable()
