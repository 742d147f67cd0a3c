"""``Case``: a row of the table has two sides, and a goal for the ratio of their times or memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from benchmarks import memory

# Does its part once, within ``place.timed()``, and returns a fingerprint of the result: floats,
# strings, or lists and tuples of them, or ``None`` if the two sides' results cannot be compared.
Turn = Callable[[], Any]


class Place:
    """A rank, as the sides of a case see it.

    Attributes:
        rank, size: number of the rank, and of ranks.
        directory: an empty folder on disk that all ranks and both sides of the case share.
        tiny: whether the case has to be tiny, for a test or to load code.
        seconds, processor: wall time and processor time of the turn's timed part.
        bytes: peak of resident memory above that at the start of that part, if it is measured.
    """

    def __init__(self, rank: int, size: int, directory: Path, *, tiny: bool = False, weighs: bool = False) -> None:
        self.rank, self.size, self.directory, self.tiny, self.weighs = rank, size, directory, tiny, weighs
        self._peak: memory.Peak | None = None
        self.reset()

    def reset(self) -> None:
        """Forget what the last turn has measured."""
        self.seconds, self.processor, self.bytes = 0.0, 0.0, 0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the block, which every rank has to enter; several blocks of a turn add up."""
        with contextlib.ExitStack() as stack:
            self._peak = stack.enter_context(memory.measured()) if self.weighs else None
            dist.barrier()
            self.forget_peak()
            start, worked = time.perf_counter(), time.process_time()
            yield
            self.record(time.perf_counter() - start, time.process_time() - worked)
            dist.barrier()
        if self._peak is not None:
            self.bytes = max(self.bytes, self._peak.bytes or 0)

    def forget_peak(self) -> None:
        """Forget the peak of memory so far, within the timed part."""
        if self._peak is not None:
            self._peak.reset()

    def record(self, seconds: float, processor: float) -> None:
        """Add times that were measured otherwise, such as those of another process."""
        self.seconds += seconds
        self.processor += processor

    def turn(self, run: Callable[[], Any], check: Callable[[Any], Any] = lambda result: None) -> Turn:
        """Return the turn that times ``run``, and whose fingerprint is ``check`` of its result."""

        def turn() -> Any:
            with self.timed():
                result = run()
            return check(result)

        return turn


class Case(NamedTuple):
    """One row of the table.

    Attributes:
        name: its name, for ``--rows``.
        title, peer: the words for it, and for the other side, in the table.
        goal: the largest ratio of ours and theirs.
        ours, theirs: make what a side needs, once on every rank, and return the turn.
        ranks: the numbers of ranks; each is a row.
        fresh: whether every turn runs in new processes, which have imported torch alone.
        measure: ``"seconds"``, or ``"bytes"`` for the peak of resident memory, which is fresh.
        before: runs once before the race, in a group of its own, such as to save what is restored.
        before_ranks: number of ranks of that group; 0 for that of the race.
    """

    name: str
    title: str
    peer: str
    goal: float
    ours: Callable[[Place], Turn]
    theirs: Callable[[Place], Turn]
    ranks: tuple[int, ...] = (2,)
    fresh: bool = False
    measure: str = "seconds"
    before: Callable[[Place], object] | None = None
    before_ranks: int = 0
