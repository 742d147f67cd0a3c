"""Processor time of the phases of one measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Phases"]

_T = TypeVar("_T")


class Phases(dict[str, float]):
    """Seconds of processor time by phase; a phase that runs again replaces its time."""

    def timed(self, phase: str, run: Callable[[], _T]) -> _T:
        """Call ``run``, note its time as that of ``phase``, and return its result."""
        begin = time.process_time()
        found = run()
        self[phase] = time.process_time() - begin
        return found
