"""Stores in memory that fail, fall silent, or count what is asked of them; and a wait for a condition."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["FailingStore", "SuspendedStore", "until"]


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Return what a condition finds, once it does: a thread of a loaded machine may be late."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


class SuspendedStore:
    """A store whose process is suspended after so many reads, until ``goes_on`` is set; it takes what is written."""

    def __init__(self, answers: float = math.inf) -> None:
        self.inner, self.goes_on, self.answers = dist.HashStore(), threading.Event(), answers

    def clone(self) -> SuspendedStore:
        return self

    def set(self, key: str, text: str) -> None:
        self.inner.set(key, text)

    def get(self, key: str) -> bytes:
        self._wait()
        return self.inner.get(key)

    def check(self, keys: list[str]) -> bool:
        self._wait()
        return self.inner.check(keys)

    def _wait(self) -> None:
        self.answers -= 1
        if self.answers < 0:
            self.goes_on.wait()


class FailingStore:
    """A store that counts the requests of each kind, and whose next ``failures`` calls fail, as when a connection is cut."""

    def __init__(self, failures: float = 0) -> None:
        self.inner, self.failures, self.requests = dist.HashStore(), failures, Counter[str]()

    def clone(self) -> FailingStore:
        return self

    def __getattr__(self, name: str) -> Any:
        if name != "path":  # which only a file has
            self.requests[name] += 1
            if self.failures:
                self.failures -= 1
                raise dist.DistNetworkError("Connection reset by peer")
        return getattr(self.inner, name)
