"""Races of a case: its two sides take turns in the same rank processes, or in fresh ones."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.life.case import Case, Place, Turn
from benchmarks.life.rows import find
from benchmarks.rank_processes import FailedError, RankProcesses

__all__ = ["SIDES", "Measured", "Result", "race"]

SIDES = ("ours", "theirs")
TIMEOUT = 300.0  # seconds for one turn
# What the ranks of a case that is not fresh have imported when they start. Why Dynamo: the first
# step of torch.optim imports it.
PRELOAD = ["benchmarks.life.racing", "funcshard", "torch.distributed.fsdp", "torch._dynamo"]
EQUAL = 1e-4  # accepted relative difference of floats in fingerprints


@dataclass(frozen=True, slots=True)
class Measured:
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


def race(file: str, case: Case, ranks: int, *, rounds: int, tiny: bool = False, shared: Any = None) -> Result:
    """Race the two sides of a case; an error becomes part of the result.

    Arguments:
        file: file of the case.
        case: the case.
        ranks: number of ranks.
        rounds: turns of each side.
        tiny: whether to run the tiny variant, once warm, with no fresh processes.
        shared: a dictionary that keeps groups of processes for the next tiny case.
    """
    result = Result(case, ranks)
    rounds = min(rounds, case.most_rounds)
    fresh = (case.fresh or case.measure == "bytes") and not tiny
    groups: dict[int, RankProcesses] = {} if shared is None else shared
    try:
        with tempfile.TemporaryDirectory(prefix="life-", dir=_disk()) as folder:
            (here := Path(folder) / "files").mkdir()
            asked = (file, case.name, str(here), tiny, case.measure == "bytes")
            if case.before is not None:
                with _group(case.before_ranks or ranks, groups if tiny else None) as group:
                    group.call("before", *asked)
            with contextlib.ExitStack() as stack:
                lasting = None if fresh else stack.enter_context(_group(ranks, groups if tiny else None))
                if lasting is not None:
                    lasting.call("make", *asked)
                for i in range(0 if fresh or tiny else -1, rounds):
                    for side in SIDES if i % 2 else SIDES[::-1]:
                        measured = _fresh_turn(asked, ranks, side, i) if lasting is None else _turn(lasting, side, i)
                        if i >= 0:
                            result.turns[side].append(measured)
        _check(result)
    except FailedError as error:
        result.error = str(error)
        for group in groups.values():
            group.close()
        groups.clear()
    return result


def _fresh_turn(asked: tuple[Any, ...], ranks: int, side: str, number: int) -> Measured:
    with _start(ranks, fresh=True) as group:
        group.call("make", *asked, (side,))
        return _turn(group, side, number)


def _turn(group: RankProcesses, side: str, number: int) -> Measured:
    seconds, processor, peaks, prints = zip(*group.call("turn", side, number), strict=True)
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


def _disk() -> str | None:
    """Return a folder on a disk for checkpoints, if the usual folder is in memory and it is named."""
    return os.environ.get("LIFE_DIRECTORY") or None


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
        before = find(file, name).before
        assert before is not None
        before(Place(self.rank, self.size, Path(directory), tiny=tiny))

    def make(self, file: str, name: str, directory: str, tiny: bool, weighs: bool, sides: tuple[str, ...] = SIDES) -> None:
        self.sides = {}
        case = find(file, name)
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
        self.place = Place(self.rank, self.size, Path(directory), tiny=tiny)
        self.place.weighs = weighs
        self.sides = {side: getattr(case, side)(self.place) for side in sides}

    def turn(self, side: str, number: int) -> tuple[float, float, int, Any]:
        place = self.place
        place.reset()
        place.round = number
        dist.barrier()
        prints = self.sides[side]()
        return place.seconds, place.processor, place.bytes, prints
