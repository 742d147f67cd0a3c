"""The memory of a rank by category, at every moment."""

from __future__ import annotations

from funcshard.estimate.trace import Run
from funcshard.estimate.walk.step import CATEGORIES, Row, Timeline

_INDEX = {category: position for position, category in enumerate(CATEGORIES)}
_OF_TAPE = tuple(_INDEX[name] for name in ("activations", "temporaries", "loss", "gradients"))
assert (*range(_OF_TAPE[0], _OF_TAPE[-1] + 1),) == _OF_TAPE, (
    "the categories of a tape lie side by side"
)
_TAPE = slice(_OF_TAPE[0], _OF_TAPE[-1] + 1)


class Ledger:
    """Add up the memory of one rank by category, and keep its moments.

    Attributes:
        moments: the moments so far, as rows.
        highest: position of the first such moment.
    """

    __slots__ = ("_now", "_tape", "highest", "moments", "peak", "total")

    def __init__(self) -> None:
        self.moments: list[Row] = []
        self.total = 0
        self.peak = -1
        self.highest = -1
        self._now = [0] * len(CATEGORIES)
        self._tape = 0  # bytes of the categories that the tape knows

    def add(self, category: str, size: int) -> None:
        self._now[_INDEX[category]] += size
        self.total += size

    def free(self, category: str, size: int) -> None:
        self._now[_INDEX[category]] -= size
        self.total -= size

    def run(self, run: Run, begin: float, end: float) -> None:
        """Keep two moments of a run: its highest memory, at ``begin``, and its end, in seconds."""
        # Why not note: a step of a large model has hundreds of runs.
        current_sizes, moments = self._now, self.moments
        other_bytes = self.total - self._tape
        # Note: a run's highest memory is somewhere inside it; its beginning is as good a place.
        current_sizes[_TAPE] = run.highest
        total_bytes = other_bytes + sum(run.highest)
        if total_bytes > self.peak:
            self.peak, self.highest = total_bytes, len(moments)
        moments.append((begin, run.what, run.unit, tuple(current_sizes)))
        current_sizes[_TAPE] = run.end
        self._tape = sum(run.end)
        self.total = total_bytes = other_bytes + self._tape
        if total_bytes > self.peak:
            self.peak, self.highest = total_bytes, len(moments)
        moments.append((end, run.what, run.unit, tuple(current_sizes)))

    def clear_tape(self) -> None:
        """Free all bytes of the categories that the tape knows."""
        self._now[_TAPE] = (0, 0, 0, 0)
        self.total -= self._tape
        self._tape = 0

    def note(self, seconds: float, what: str, unit: str) -> None:
        if self.total > self.peak:
            self.peak, self.highest = self.total, len(self.moments)
        self.moments.append((seconds, what, unit, tuple(self._now)))

    def pools(self, *, streams: bool) -> int:
        """Return the bytes of an allocator that reserves nothing.

        Arguments:
            streams: whether gathered units and reduced gradients have their own pools.
        """
        # Note: with one pool, memory that one use frees serves the next one.
        if not streams:
            return self.peak
        gathered_index, reduced_index = _INDEX["gathered"], _INDEX["gradient shards"]
        moment_sizes = [row[3] for row in self.moments]
        # Note: each pool is as large as its own peak, whenever that is.
        rest_bytes = max(
            sum(pool_sizes) - pool_sizes[gathered_index] - pool_sizes[reduced_index]
            for pool_sizes in moment_sizes
        )
        return (
            rest_bytes
            + max(pool_sizes[gathered_index] for pool_sizes in moment_sizes)
            + max(pool_sizes[reduced_index] for pool_sizes in moment_sizes)
        )

    def timeline(self) -> Timeline:
        return Timeline(self.moments, self.highest)
