"""``without_collection``: let Python look for garbage later."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

# Why: threads that look and switch at the same time would leave the searches off.
_lock = threading.Lock()


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Run the ``with`` block without searches for garbage in cycles.

    Python has one switch for all threads. The block that found it on turns it on again.
    """
    with _lock:
        was_enabled = gc.isenabled()
        # Why: each search walks through all objects, and the trace of 80,000 modules has
        # a million. Searches would double its time.
        gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
