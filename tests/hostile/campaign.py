"""Run the rounds of a campaign: each has a seed, and a fault names the command that repeats it.

Round ``i`` of a campaign has the seed ``first + i``, so a run of one round with that seed is this
round alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from types import FrameType

FULL = -1  # as a number of rounds: the big number of each campaign
_MOST_FAULTS = 25  # after so many the campaign ends
_LONGEST = 4000  # characters of a fault that are shown


def slowness() -> float:
    """Return by how much this machine is slower than an idle one: limits are for idle machines."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@dataclass(slots=True)
class Campaign:
    """The rounds of one test."""

    test: str  # the test's node id, which pytest takes
    seed: int = 1  # of the first round
    rounds: int | None = None  # None for the short part, FULL for all
    counts: Counter[str] = field(default_factory=Counter)  # what the rounds did, such as {"rounds": 200, "kills": 230}
    faults: list[tuple[int, str]] = field(default_factory=list)  # the seed and the error of each round that failed
    seconds: float = 0.0  # that all rounds took

    def run(self, body: Callable[[Random], Mapping[str, int] | None], *, short: int, full: int, limit: float) -> None:
        """Call ``body(draw)`` once a round, ``short`` or ``full`` times, and raise at the end if any failed.

        A round hangs if it takes longer than ``limit`` seconds, or more on a loaded machine.
        """
        rounds = {None: short, FULL: full}.get(self.rounds, self.rounds)
        assert rounds is not None
        began = time.monotonic()
        for seed in range(self.seed, self.seed + rounds):
            try:
                with within(limit * slowness()):
                    self.counts.update(body(Random(seed)) or {})
            except Exception as error:
                told = isinstance(error, AssertionError | TimeoutError) and str(error)
                self.faults.append((seed, (told or "".join(traceback.format_exception(error)))[-_LONGEST:]))
            self.counts["rounds"] += 1
            if len(self.faults) == _MOST_FAULTS:
                break
        self.seconds = time.monotonic() - began
        if self.faults:
            raise AssertionError("\n\n".join(f"{self.replay(seed)}\n{text}" for seed, text in self.faults))

    def replay(self, seed: int) -> str:
        """Return the command that repeats the round of a seed."""
        return f"python -m pytest '{self.test}' -m hostile --hostile-seed {seed} --hostile-rounds 1"

    def row(self) -> str:
        """Return the campaign as a row of the table in docs/dev/campaign.md."""
        counts, name = dict(self.counts), self.test.removeprefix("tests/hostile/test_").replace(".py::test_", ": ")
        rounds = counts.pop("rounds")
        done = ", ".join(f"{number:,} {word}" for word, number in sorted(counts.items())) or "–"
        seeds = f"{self.seed}–{self.seed + rounds - 1}" if rounds > 1 else str(self.seed)
        return f"| {name.replace('_', ' ')} | {seeds} | {done} | {len(self.faults)} | {self.seconds / 60:.1f} |"


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise ``TimeoutError`` in the main thread if the ``with`` block takes longer than this."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"a round hangs: it has not ended within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
