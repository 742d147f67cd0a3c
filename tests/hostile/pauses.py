"""Stop random processes for a while, as a debugger, a full disk or a busy machine does."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from random import Random

from tests.hostile.nursery import Rank


class Pauses:
    """A thread that stops some of the ranks for up to ``longest`` seconds, again and again.

    Most pauses are much shorter. ``counts["pauses"]`` counts how many ranks were stopped.
    """

    def __init__(self, draw: Random, ranks: Sequence[Rank], longest: float, counts: Counter[str]) -> None:
        self._draw, self._longest, self._counts = draw, longest, counts
        # Why no numbers of processes: another one could have the number of a process that has ended.
        self._files = [os.pidfd_open(rank.pid) for rank in ranks]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Pauses:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for file in self._files:
            os.close(file)

    def _run(self) -> None:
        while not self._end.wait(self._draw.random() * 0.05):
            chosen = [file for file in self._files if self._draw.random() < 0.4]
            for number, seconds in ((signal.SIGSTOP, self._draw.random() ** 4 * self._longest), (signal.SIGCONT, 0.0)):
                for file in chosen:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(file, number)
                time.sleep(seconds)
            self._counts["pauses"] += len(chosen)
