"""Races of a case: its two sides take turns in the same rank processes, or in fresh ones."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from benchmarks.life.case import Case, Place, Turn
from benchmarks.rank_processes import FailedError, RankProcesses

SIDES = ("ours", "theirs")
# Files of this package with a tuple CASES. Why names: a fresh rank imports the file of its case and
# no other, because libraries that other cases import would count as loaded.
FILES = ("start", "building", "checkpoints", "helpers", "transforms")
TIMEOUT = 300.0  # seconds for one turn
# What the ranks of a case that is not fresh have imported when they start. Why Dynamo: the first
# step of torch.optim imports it.
PRELOAD = ["benchmarks.life.racing", "funcshard", "torch.distributed.fsdp", "torch._dynamo"]
EQUAL = 1e-4  # accepted relative difference of floats in fingerprints
HEADER = ["what", "ranks", "peer", "ours", "theirs", "ratio (quartiles)", "of processor time", "goal", ""]


def cases_of(file: str) -> dict[str, Case]:
    """Return the cases of a file by name."""
    return {case.name: case for case in importlib.import_module(f"benchmarks.life.{file}").CASES}


class Measured(NamedTuple):
    """The slowest rank's seconds in one turn, the processor time of all ranks, and the highest peak."""

    seconds: float
    processor: float
    bytes: int
    prints: tuple[Any, ...]


@dataclass(slots=True)
class Result:
    """The turns of both sides of a row, or the error that ended the race."""

    case: Case
    ranks: int
    turns: dict[str, list[Measured]] = field(default_factory=lambda: {side: [] for side in SIDES})
    error: str = ""

    def row(self) -> list[str]:
        """Return the row of the table."""
        from benchmarks.results import ratio, spread

        case = self.case
        start = [case.title, str(self.ranks), case.peer]
        goal = f"≤ {case.goal:.2f}"
        if self.error:
            last = self.error.strip().splitlines()[-1].replace("|", "/")[:200]
            return [*start, "", "", "", "", goal, f"failed: {last}"]
        ours, theirs = ([getattr(turn, case.measure) for turn in self.turns[side]] for side in SIDES)
        worked = [[turn.processor for turn in self.turns[side]] for side in SIDES]
        if not all(theirs):  # nothing was measured
            return [*start, "", "", "", "", goal, "not measured"]
        found = ratio(ours, theirs)
        processor = f"{ratio(*worked).median:.2f}" if case.measure == "seconds" and all(worked[1]) else ""
        reached = "met" if found.median <= case.goal else "missed"
        unit, factor = ("MiB", 2**-20) if case.measure == "bytes" else ("ms", 1000)
        amounts = [f"{factor * spread(values).median:.1f} {unit}" for values in (ours, theirs)]
        return [*start, *amounts, found.text(2), processor, goal, reached]


def race(file: str, case: Case, ranks: int, *, rounds: int, tiny: bool = False, shared: Any = None) -> Result:
    """Race the two sides of a case of a file; an error becomes part of the result.

    Tiny variants run in no fresh processes; ``shared`` keeps groups of processes for the next tiny case.
    """
    result = Result(case, ranks)
    fresh = (case.fresh or case.measure == "bytes") and not tiny
    groups: dict[int, RankProcesses] = {} if shared is None else shared
    try:
        # Why a variable: the usual folder may be in memory, and checkpoints belong on a disk.
        with tempfile.TemporaryDirectory(prefix="life-", dir=os.environ.get("LIFE_DIRECTORY")) as folder:
            asked = (file, case.name, folder, tiny, case.measure == "bytes")
            if case.before is not None:
                with _group(case.before_ranks or ranks, groups if tiny else None) as group:
                    group.call("before", *asked)
            with contextlib.ExitStack() as stack:
                lasting = None if fresh else stack.enter_context(_group(ranks, groups if tiny else None))
                if lasting is not None:
                    lasting.call("make", *asked)
                for i in range(0 if fresh or tiny else -1, rounds):
                    for side in SIDES if i % 2 else SIDES[::-1]:
                        measured = _fresh_turn(asked, ranks, side) if lasting is None else _turn(lasting, side)
                        if i >= 0:
                            result.turns[side].append(measured)
        _check(result)
    except FailedError as error:
        result.error = str(error)
        for group in groups.values():
            group.close()
        groups.clear()
    return result


def _fresh_turn(asked: tuple[Any, ...], ranks: int, side: str) -> Measured:
    with _start(ranks, fresh=True) as group:
        group.call("make", *asked, (side,))
        return _turn(group, side)


def _turn(group: RankProcesses, side: str) -> Measured:
    seconds, processor, peaks, prints = zip(*group.call("turn", side), strict=True)
    return Measured(max(seconds), sum(processor), max(peaks), prints)


def _check(result: Result) -> None:
    """Raise unless all turns of both sides have the same fingerprints, up to rounding."""
    every = [(side, turn.prints) for side in SIDES for turn in result.turns[side]]
    for side, prints in every[1:]:
        if not _alike(prints, every[0][1]):
            raise FailedError(f"the sides' results differ: {every[0][0]} {every[0][1]}, {side} {prints}")


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=EQUAL) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    return a is None or b is None or a == b


# --- the group of processes -----------------------------------------------------------------------


def _start(size: int, *, fresh: bool = False) -> RankProcesses:
    return RankProcesses(size, _Rank, preload=None if fresh else PRELOAD, timeout=TIMEOUT)


@contextlib.contextmanager
def _group(size: int, kept: dict[int, RankProcesses] | None) -> Iterator[RankProcesses]:
    """Yield a group of processes: a new one, or the one of that size in ``kept``."""
    if kept is None:
        with _start(size) as group:
            yield group
        return
    if size not in kept:
        kept[size] = _start(size)
    yield kept[size]


class _Rank:
    """The state of one rank between its turns."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sides: dict[str, Turn] = {}

    def before(self, file: str, name: str, directory: str, tiny: bool, weighs: bool) -> None:
        before = cases_of(file)[name].before
        assert before is not None
        before(Place(self.rank, self.size, Path(directory), tiny=tiny))

    def make(self, file: str, name: str, directory: str, tiny: bool, weighs: bool, sides: tuple[str, ...] = SIDES) -> None:
        self.sides = {}
        case = cases_of(file)[name]
        if weighs and not tiny:  # load the code, which does not count
            loading = Path(directory) / "loading"
            place, is_new = Place(self.rank, self.size, loading, tiny=True), not loading.exists()
            dist.barrier()
            loading.mkdir(exist_ok=True)
            if is_new and case.before is not None:
                case.before(place)
            dist.barrier()
            for side in sides:
                getattr(case, side)(place)()
        self.place = Place(self.rank, self.size, Path(directory), tiny=tiny, weighs=weighs)
        self.sides = {side: getattr(case, side)(self.place) for side in sides}

    def turn(self, side: str) -> tuple[float, float, int, Any]:
        place = self.place
        place.reset()
        dist.barrier()
        prints = self.sides[side]()
        return place.seconds, place.processor, place.bytes, prints
