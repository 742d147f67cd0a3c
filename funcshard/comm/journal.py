"""Find ranks that wait for each other on different axes or meshes, and say so on each of them.

If one rank continues with an all-gather along ``shard`` and its neighbour with an all-reduce along
``replicate``, each axis by itself looks like one with slow ranks. So all axes of all meshes of a
process share a ``Journal``. A rank that has waited longer than ``patience`` writes into the job's
store for which collective it waits, and how many it has issued on each of its axes. Then it reads
the same of the ranks that it waits for. To make a mesh counts as a collective (``meeting``).

A rank waits for another one if that one has issued fewer collectives on the axis. If these waits
form a circle, no rank of it can continue, however long the others take; a rank that is merely slow
is in no circle. No circle is found if a rank waits for the second part of a large all-reduce, which
another one begins only when it waits for the first, nor if a rank has left the program. Then the
group's timeout ends the wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from funcshard._utils.torch_groups import destroy_group, has_ended
from funcshard.comm.liveness import Detector, Heart, read, some_of

# Number of ranks that an error describes, and number of ranks of the longest circle that is found.
_MOST_DESCRIBED, _LONGEST = 8, 200


class Wait(NamedTuple):
    """A collective that a rank waits for.

    Attributes:
        group: name of the group, the same on all of its ranks.
        number: of the collective on the axis.
        what: the collective and its axis as text.
        ranks: the global ranks without whose part the collective cannot end.
        serial: number of the wait on this rank.
    """

    group: str
    number: int
    what: str
    ranks: Sequence[int]
    serial: int


class _Note(NamedTuple):
    """The note of one rank.

    Attributes:
        beat: how many notes the rank has written before.
        wait: the collective that it waits for.
        counts: how many collectives it has issued, by group; ``None`` where another thread may
            issue more.
        blocker: the rank that blocks it, once it has found a circle and waits no more.
    """

    beat: int
    wait: Wait
    counts: dict[str, int | None]
    blocker: int | None = None

    @property
    def ended(self) -> bool:
        return self.blocker is not None

    def text(self) -> str:
        return json.dumps(
            self, default=lambda ranks: {"range": [ranks.start, ranks.stop, ranks.step]}
        )

    @classmethod
    def of(cls, text: bytes) -> _Note:
        beat, (group, number, title, ranks, serial), counts, blocker = json.loads(text)
        if isinstance(ranks, dict):
            ranks = range(*ranks["range"])
        return cls(beat, Wait(group, number, title, ranks, serial), counts, blocker)

    def lacks(self, wait: Wait) -> bool:
        """Return whether this rank has not issued the collective of another one's wait."""
        # A rank that has not made the group yet, or has it no more, has issued nothing on it. But
        # another of its threads, if there is one, may still make it.
        unknown = None if None in self.counts.values() else 0
        count = self.counts.get(wait.group, unknown)
        return count is not None and count < wait.number


def compact(ranks: Sequence[int]) -> Sequence[int]:
    """Return numbers as a ``range`` if they have equal distances, as along a mesh axis."""
    if len(ranks) > 1 and ranks[0] != ranks[1]:
        step = ranks[1] - ranks[0]
        regular_ranks = range(ranks[0], ranks[0] + step * len(ranks), step)
        if [*ranks] == [*regular_ranks]:
            return regular_ranks
    return ranks


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of histories that has been started.

    Attributes:
        own: number and history of this rank at its start.
        highest: the maxima over ranks of these, of their negatives, and of the caller's values.
        work: the all-reduce of ``highest``.
    """

    own: tuple[int, int]
    highest: torch.Tensor
    work: Any


@dataclass(slots=True)
class Unused:
    """A process group whose users on this rank are gone.

    Attributes:
        group: the process group.
        comparison: the last one over it, if any.
        store: the store with the latest collectives of its ranks, if any.
        rank: position of this rank in it.
    """

    group: Any
    comparison: Comparison | None = None
    store: Any = None
    rank: int = 0


class Journal:
    """The waits of one rank, over all axes of all of its meshes.

    Arguments:
        rank: global rank of this process.
        store: the store for the notes, whose calls do not wait for long.
        heart: the signs of life of this process, if any.

    Attributes:
        rank, store, heart: see above.
        unused: process groups of axes that are gone, appended on any thread and in the middle of
            any code.
        groups: the groups of this rank by number, in the order in which it made them.
        attempt: the log of the attempt that runs; ``None`` for none.
        watcher: the thread that looks whether it has failed on another rank.
    """

    def __init__(self, rank: int, store: Any, heart: Heart | None = None) -> None:
        self.rank = rank
        self.store = store
        self.heart = heart
        self.unused: list[Unused] = []
        self.groups: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.attempt: Any = None
        self.watcher: threading.Thread | None = None
        self._process = os.getpid()
        self._counts: dict[str, int] = {}
        self._detectors: weakref.WeakValueDictionary[str, Detector] = weakref.WeakValueDictionary()
        self._beat = 0
        self._serial = 0
        self._looks = 0
        self._suspected: dict[int, _Note] = {}
        self._seen: dict[int, _Note] = {}

    def add(self, group: str, detector: Detector) -> None:
        """Add the detector of one axis."""
        self._detectors[group] = detector

    def is_broken(self) -> bool:
        """Return whether this rank has closed connections of an axis."""
        return any(detector.closed for detector in list(self._detectors.values()))

    def count(self, group: str) -> int:
        """Count one more action of ``group`` that has no detector, and return its number."""
        self._counts[group] = self._counts.get(group, 0) + 1
        return self._counts[group]

    def begin_wait(self) -> int:
        """Return the number of a wait that exceeds ``patience``."""
        self._serial += 1
        # What an earlier wait has seen says nothing about this one.
        self._suspected.clear()
        self._seen.clear()
        return self._serial

    def find_circle(self, wait: Wait, *, failed: bool = False) -> str:
        """Return an error message if ranks wait for each other; ``""`` if they do not, or not yet.

        Arguments:
            wait: the collective that this rank waits for.
            failed: whether it has failed, as it does if another rank has found the circle and
                ended.
        """
        try:
            own_note = self._write(wait)
            self._looks += 1
            circle = self._circle(own_note, failed)
            # Why twice: a rank may read old notes. But ranks write again at each look, so a circle
            # whose notes are all new the second time was one at the moment of the first look.
            suspected_before, self._suspected = self._suspected, circle
            # Why failed is enough: that circle ends at a rank that has looked twice.
            if not circle or not (
                failed
                or all(_lasts(note, suspected_before.get(rank)) for rank, note in circle.items())
            ):
                return ""
            # Why before it raises: ranks whose collectives fail by this read the cause here.
            self._write(wait, _blocker(own_note, circle))
        # The store is silent, its process has ended, or notes are cut short.
        except (RuntimeError, ValueError):
            return ""
        return _message(circle)

    def close_connections(self) -> None:
        """Close this rank's connections on all axes."""
        for detector in list(self._detectors.values()):
            detector.close_connections()

    def destroy_unused(self) -> None:
        """Destroy the process groups of axes that are gone, and delete their keys in the store.

        Call it where the ranks have left the collectives of a mesh that is gone.
        """
        for _ in range(len(self.unused)):
            unused = self.unused.pop(0)
            if unused.comparison is not None and not has_ended(unused.comparison.work):
                self.unused.append(unused)
                continue
            if unused.store is not None:
                with contextlib.suppress(RuntimeError):
                    for name in ("", "rendezvous/"):
                        unused.store.delete_key(f"{name}{unused.rank}")
            if unused.comparison is not None:
                time.sleep(0.001)
            # Why the group first: torch joins gloo's threads when it destroys a group. A thread
            # that is still in a comparison needs Python's lock to free its tensors, and the join
            # holds it for ever. Until then the comparison keeps them.
            unused_group, unused.group = unused.group, None
            destroy_group(unused_group)
            del unused_group

    def finish(self, seconds: float) -> None:
        """Wait so long for the last comparisons of axes that are gone, at the process's end."""
        if os.getpid() != self._process:  # a forked child has none of gloo's threads
            return
        # Why: the other ranks wait for this one's part, and Python then destroys all groups.
        end_time = time.monotonic() + seconds
        for comparison in [unused.comparison for unused in self.unused]:
            while (
                comparison is not None
                and not has_ended(comparison.work)
                and time.monotonic() < end_time
            ):
                time.sleep(0.001)

    def _write(self, wait: Wait, blocker: int | None = None) -> _Note:
        self._beat += 1
        # Why only those of this thread: another thread may still issue collectives on its axes.
        thread_number = threading.get_ident()
        counts: dict[str, int | None] = dict(self._counts)
        counts |= {
            group_name: detector_state.number
            if detector_state.thread in (0, thread_number)
            else None
            for group_name, detector_state in self._detectors.items()
        }
        note = _Note(self._beat, wait, counts, blocker)
        self.store.set(str(self.rank), note.text())
        return note

    def _circle(self, own: _Note, failed: bool) -> dict[int, _Note]:
        """Return the notes of ranks that each wait for the next, from this one into a circle."""
        notes: dict[int, _Note | None] = {self.rank: own}
        path = {self.rank: own}
        done_ranks = set[int]()
        # For each rank of the path, those for which it waits and that are still to be visited.
        branches = [iter(self._next(own, notes))]
        while branches:
            rank, note = next(reversed(path.items()))
            next_rank = next(branches[-1], None)
            if next_rank is None:
                branches.pop()
                done_ranks.add(rank)
                del path[rank]
                continue
            next_note = self._read(next_rank, notes)
            if next_note is None or next_rank == rank or next_rank in done_ranks:
                continue
            # Note: a rank that has joined may be slow, but it is not what this one waits for.
            if not next_note.lacks(note.wait):
                continue
            if next_rank in path:
                # It has no second look, and what it sees once may be a rank that goes on.
                if failed:
                    continue
                break
            # Note: a rank whose collective has failed cannot look twice, so it looks for one that
            # has.
            if next_note.ended and (failed or self._ended_meanwhile(next_rank, next_note)):
                path[next_rank] = next_note
                break
            path[next_rank] = next_note
            branches.append(iter(self._next(next_note, notes) if len(path) < _LONGEST else ()))
        waiting_notes = {
            r: note for r, note in notes.items() if note is not None and not note.ended
        }
        self._seen.update(waiting_notes)
        return path

    def _read(self, rank: int, notes: dict[int, _Note | None]) -> _Note | None:
        if rank not in notes:
            note_text = read(self.store, rank)
            notes[rank] = _Note.of(note_text) if note_text else None
        return notes[rank]

    def _next(self, note: _Note, notes: Mapping[int, object]) -> Sequence[int]:
        """Return the ranks for which a rank waits, or some of many."""
        waited_ranks = note.wait.ranks
        # Why first: a circle counts if a second look finds it again.
        known_ranks = [rank for rank in (*self._suspected, *notes) if rank in waited_ranks]
        return some_of(waited_ranks, self._looks, known_ranks)

    def _ended_meanwhile(self, rank: int, note: _Note) -> bool:
        """Return whether a rank has ended since this one saw it wait."""
        seen_note = self._seen.get(rank)
        return seen_note is not None and seen_note.wait == note.wait and note.beat > seen_note.beat


def _lasts(note: _Note, before: _Note | None) -> bool:
    """Return whether a rank has waited since the last look."""
    return note.ended or (
        before is not None and before.wait == note.wait and note.beat > before.beat
    )


def _blocker(note: _Note, circle: dict[int, _Note]) -> int | None:
    if note.blocker is not None:
        return note.blocker
    return next(
        (
            rank
            for rank, blocking_note in circle.items()
            if rank in note.wait.ranks and blocking_note.lacks(note.wait)
        ),
        None,
    )


def _message(circle: dict[int, _Note]) -> str:
    rank_lines = [
        f"rank {rank} waits for {note.wait.what}, which rank {_blocker(note, circle)} has not "
        "reached"
        for rank, note in circle.items()
    ]
    if len(rank_lines) > _MOST_DESCRIBED:
        rank_lines[_MOST_DESCRIBED:] = [f"and {len(rank_lines) - _MOST_DESCRIBED} more ranks"]
    return (
        "ranks wait for each other in collectives of different axes or meshes, and none can go "
        f"on: {'; '.join(rank_lines)}; every rank has to issue the same ones in the same order"
    )
