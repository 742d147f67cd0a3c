"""``without_collection``: code that makes many objects, and lets Python look for garbage later."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["without_collection"]


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Run the ``with`` block without searches for garbage in cycles.

    Python starts such a search after a number of new objects, and each one walks through all
    objects. A model of 80,000 modules has a million of them, so half of the time that its trace
    takes would be such searches. Objects outside of cycles are freed at once, as always. After the
    block, also after an error, searches go on if they were on before.

    Example:
        >>> import gc
        >>> from funcshard._utils import without_collection
        >>> with without_collection():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
