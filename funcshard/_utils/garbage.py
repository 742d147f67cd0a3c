"""``without_collection``: let Python look for garbage later."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


class _Blocks:
    """The blocks that run in all threads, because Python has one switch."""

    lock = threading.Lock()
    number = 0
    enabled = True  # before the first of them


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Run the ``with`` block without searches for garbage in cycles.

    After the last block of all threads, searches continue if they were on before.
    """
    with _Blocks.lock:
        if not _Blocks.number:
            _Blocks.enabled = gc.isenabled()
        _Blocks.number += 1
        # Why: each search walks through all objects, and the trace of 80,000 modules has
        # a million. Searches would double its time.
        gc.disable()
    try:
        yield
    finally:
        with _Blocks.lock:
            _Blocks.number -= 1
            if not _Blocks.number and _Blocks.enabled:
                gc.enable()
