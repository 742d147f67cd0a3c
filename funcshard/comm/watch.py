"""``Watch``: find out why a rank waits in vain, from what all ranks show in the job's store.

A rank that waits cannot tell a slow rank from one that waits for it elsewhere, that is suspended,
whose machine hangs, or that was killed while a child that it forked still holds its connections. So
each process has a ``Watch``, and shows a ``Record`` in the job's store. A thread writes it every
few seconds, as a sign of life: a number that grows, and the latest collective.

A rank that has waited longer than ``patience`` looks (``Watch.why``). It adds to its record for
which collective it waits, how many it has issued on each of its axes, and its latest ones on this
axis. Then it reads the records of the ranks that it waits for, and looks for four causes:

- A rank knows why its own wait was in vain, and has ended. Its connections are closed, so that the
  collectives of other ranks fail too, and each of them takes over the cause.
- Ranks have issued different collectives.
- Ranks wait for each other. A rank waits for another one if that one has issued fewer collectives
  on the axis. If these waits form a circle, no rank of it can continue, however long the others
  take; a rank that is merely slow is in no circle. To make a mesh counts as a collective
  (``job.meet``). No circle is found if a rank waits for the second part of a large all-reduce,
  which another one begins only when it waits for the first.
- A rank is lost: its beat has stayed the same for ``give_up`` seconds; or it runs on the same
  machine, and its process has ended without a farewell, which a process that ends by itself writes
  as its last beat. After a farewell a rank is lost only if ranks wait for it to make a mesh: in a
  collective, its part may have come before. A rank that computes, compiles, or sits at a breakpoint
  beats, and is never given up.

A call of a store whose process is suspended never returns. So the thread makes all calls of the
store, and a rank waits a second for an answer.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import math
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from funcshard._utils.torch_groups import (
    destroy_group,
    has_ended,
    reconnected,
    store_for_thread,
    store_is_gone,
)

T = TypeVar("T")
Answer = concurrent.futures.Future[Any]

# Seconds between two beats: at most the first number, and at least so many beats in ``give_up``.
_LONGEST, _BEATS = 5.0, 8

# Number of ranks that a rank reads about in one look, that an error describes, and whose waits a
# rank follows in one look.
MOST_READ, _MOST_NAMED, _MOST_FOLLOWED = 64, 8, 200

# Seconds that the store may take for one answer before it counts as silent.
_ANSWER = 1.0

_CIRCLE = "ranks wait for each other in collectives of different axes or meshes, and none can continue: "
SAME_ORDER = "every rank has to issue the same ones in the same order"
_LEFT = "has left the job"

# Seconds without a sign of life after which a rank is given up, by default.
GIVE_UP = 120.0


class Limits(NamedTuple):
    """How long a rank waits for others.

    Attributes:
        patience: seconds after which a waiting rank looks at the others.
        give_up: seconds without a sign of life after which it gives one up.
    """

    patience: float = 5.0
    give_up: float = GIVE_UP


LIMITS = Limits()  # those of ``init_mesh``, by default


class LostError(RuntimeError):
    """A rank waits in vain; the message says why."""


class SilentStoreError(RuntimeError):
    """The store of the job has not answered in time; it may answer later."""


# Kind, label, dtype and number of elements of a collective.
Entry = tuple[str, str, torch.dtype | None, int]


def title_of(entry: Entry) -> str:
    """Return a collective as text."""
    title, label, dtype, numel = entry
    if dtype is not None:
        title += f" of {str(dtype).removeprefix('torch.')}[{numel}]"
    return f"{title} of {label}" if label else title


class Wait(NamedTuple):
    """A collective that a rank waits for.

    Attributes:
        group: name of the group, the same on all of its ranks.
        number: of the collective on the axis; 0 outside of collectives.
        what: the collective and its axis as text.
        ranks: the global ranks without whose part the collective cannot end.
    """

    group: str = ""
    number: int = 0
    what: str = ""
    ranks: Sequence[int] = ()


class Detector(Protocol):
    """The part of a ``DesyncDetector`` that a watch uses."""

    axis: str
    limits: Limits
    number: int
    thread: int
    closed: bool

    def titles(self) -> Mapping[str, str]:
        """Return the latest collectives as text, by number."""

    def close_connections(self) -> None:
        """Close this rank's connections on the axis."""


class Record(NamedTuple):
    """What a rank shows to the others.

    Attributes:
        beat: how often the rank has written its record.
        place: see ``_place_of``.
        every: seconds between two beats.
        latest: the latest collective as text.
        left: whether the process has ended by itself.
        look: number of the rank's latest look; the rest is of that look.
        wait: the collective that the rank waited for.
        counts: how many collectives it has issued, by group; ``None`` where another thread may
            issue more.
        titles: its latest collectives on the axis, by number.
        why: why it waits in vain, once it knows.
    """

    beat: int
    place: Sequence[Any]
    every: float = _LONGEST
    latest: str = "no collective yet"
    left: bool = False
    look: int = 0
    wait: Wait = Wait()
    counts: Mapping[str, int | None] = {}
    titles: Mapping[str, str] = {}
    why: str = ""

    @classmethod
    def of(cls, text: bytes) -> Record:
        record = cls(*json.loads(text))
        return record._replace(wait=Wait(*record.wait))

    def lasts_since(self, before: Record) -> bool:
        """Return whether this rank has looked once more in the same wait."""
        return self.wait == before.wait and self.look > before.look

    def lacks(self, wait: Wait) -> bool:
        """Return whether this rank is known not to have issued the collective of another's wait."""
        if not self.wait.number:  # it does not wait, and may issue it yet
            return False
        # A rank that has not made the group yet, or has it no more, has issued nothing on it. But
        # another of its threads, if there is one, may still make it.
        unknown = None if None in self.counts.values() else 0
        count = self.counts.get(wait.group, unknown)
        return count is not None and count < wait.number


class Comparison(NamedTuple):
    """A comparison of histories that has been started.

    Attributes:
        number, history: of this rank at its start.
        highest: the maxima over ranks of these, of their negatives, and of the caller's values.
        work: the all-reduce of ``highest``.
    """

    number: int
    history: int
    highest: torch.Tensor
    work: Any


@dataclass(slots=True)
class _Pulse:
    """The state that a watch shares with its thread, which must not keep the watch alive.

    Attributes:
        store: the store, for the thread.
        key: the key of the record.
        record: the record as it was written last, by the thread.
        every: seconds between two beats.
        latest: axis, number and entry of the latest collective.
        clock: seconds that this process has lived with a watch, without pauses.
        questions: calls of the store for other threads, with a place for each answer; ``None``
            wakes the thread.
        attempt: the log of the attempt that runs; ``None`` for none.
        look_every: seconds between two looks whether it has failed on another rank.
        ended: whether the thread has to end.
        fault: why it has ended, if the process that holds the store has.
    """

    store: Any
    key: str
    record: Record
    every: float = _LONGEST
    latest: tuple[str, int, Entry] | None = None
    clock: float = 0.0
    # Why a SimpleQueue: Python may collect a watch, and stop it, on any thread and between any two
    # instructions. No lock of Python's code outlasts that.
    questions: queue.SimpleQueue[tuple[Callable[[Any], Any], Answer] | None] = field(
        default_factory=queue.SimpleQueue
    )
    attempt: Any = None
    look_every: float = math.inf
    ended: bool = False
    fault: str = ""


class Watch:
    """The record of this process, and a look at those of other ranks.

    Arguments:
        rank: global rank of this process.
        store: the store of the job.

    Attributes:
        rank: see above.
        pulse: the state of the thread.
        unused: process groups of axes that are gone, each with the last comparison over it, if any;
            appended on any thread and in the middle of any code.
        groups: the groups of this rank by number, in the order in which it made them.
    """

    def __init__(self, rank: int, store: Any) -> None:
        self.rank = rank
        first_record = Record(0, _place_of(os.getpid()))
        self.pulse = _Pulse(store_for_thread(store), f"funcshard/{rank}", first_record)
        self.unused: list[tuple[Any, Comparison | None]] = []
        self.groups: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._detectors: weakref.WeakValueDictionary[str, Detector] = (
            weakref.WeakValueDictionary()
        )
        self._counts: dict[str, int] = {}
        # The record of each rank at the last look, and the clock when it was new.
        self._seen: dict[int, tuple[Record, float]] = {}
        self._suspects: Iterable[int] = ()
        self._looks = 0
        # Seconds for which the store has not answered, and the time of the last question.
        self._silence = self._asked = 0.0
        thread = threading.Thread(
            target=_beat, args=(self.pulse,), name="funcshard watch", daemon=True
        )
        thread.start()
        # Why joined at the end of the process: Python ends daemon threads in the middle of torch's
        # code, which then ends the process with an error.
        weakref.finalize(self, _stop, self.pulse, thread, os.getpid())
        # Why waited for: ranks that connect to this one look at its beat if it ends meanwhile.
        with contextlib.suppress(RuntimeError):
            self.ask(lambda store: None)

    # --- the store --------------------------------------------------------------------------------

    def ask(self, call: Callable[[Any], T]) -> T:
        """Return ``call(store)``, made by the thread.

        Raises:
            SilentStoreError: there is no answer within a second.
            RuntimeError: the process that holds the store has ended.
            Exception: ``call`` raised it.
        """
        pulse, answer = self.pulse, concurrent.futures.Future[T]()
        if pulse.ended or pulse.fault:
            raise RuntimeError(pulse.fault or "the watch has ended")
        # Note: after a silent answer, the time between two questions counts as silence too.
        begin_time = self._asked if self._silence else time.monotonic()
        pulse.questions.put((call, answer))
        is_silent = not concurrent.futures.wait([answer], _ANSWER).done
        answer.cancel()  # if it has not begun
        self._asked = time.monotonic()
        # Why the minimum: no time counts in which this process was suspended.
        waited_seconds = min(self._asked - begin_time, _LONGEST)
        self._silence = self._silence + waited_seconds if is_silent else 0.0
        if is_silent:
            raise SilentStoreError(
                f"the store of the job has not answered for {_ANSWER:g} s"
            )
        try:
            return answer.result()
        finally:
            # Why: an error's traceback holds this frame, and this frame would hold it. The watch
            # would live on, after its rank has left, until Python looks for such garbage.
            del answer

    def get(self, key: str) -> bytes | None:
        """Return a text of the store, or ``None``."""
        return self.ask(lambda store: store.get(key) if store.check([key]) else None)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether the store has all of these texts."""
        return self.ask(lambda store: store.check([*keys]))

    # --- what this rank does ----------------------------------------------------------------------

    def add(self, group: str, detector: Detector) -> None:
        """Add the detector of one axis, and beat often enough for its ``give_up``."""
        self._detectors[group] = detector
        # The shortest ``give_up`` of all meshes of this process decides.
        self.pulse.every = min(self.pulse.every, detector.limits.give_up / _BEATS)
        self.pulse.questions.put(None)

    def count(self, group: str) -> int:
        """Count one more action of ``group`` that has no detector, and return its number."""
        self._counts[group] = self._counts.get(group, 0) + 1
        return self._counts[group]

    def is_broken(self) -> bool:
        """Return whether this rank has closed connections of an axis."""
        return any(detector.closed for detector in list(self._detectors.values()))

    def close_connections(self) -> None:
        """Close this rank's connections on all axes."""
        for detector in list(self._detectors.values()):
            detector.close_connections()

    # --- a look -----------------------------------------------------------------------------------

    def why(
        self,
        wait: Wait,
        give_up: float,
        detector: Detector | None = None,
        *,
        failed: bool = False,
        is_away: Callable[[int], bool] = lambda rank: False,
    ) -> str:
        """Return why this rank waits in vain; ``""`` if it does not, or it is not known yet.

        Arguments:
            wait: the collective that it waits for; number 0 outside of collectives.
            give_up: seconds without a sign of life after which a rank is lost.
            detector: that of the axis, whose collectives are compared, if any.
            failed: whether the collective has failed, as it does if another rank has ended.
            is_away: returns whether a rank is lost that has left the job by itself.
        """
        try:
            records = self._look(wait, detector)
            why = (
                self._told(wait.ranks, records)
                or (detector is not None and _difference(self.rank, records, detector.axis))
                # Why not if it has failed: it cannot look twice.
                or (not failed and self._circle(records))
                or self._lost(wait.ranks, records, give_up, is_away)
                or ""
            )
            if why:  # before it raises: ranks whose collectives fail by this read it here
                self.show(why=why)
        except SilentStoreError:
            if self._silence < give_up:
                return ""
            return (
                f"the store of the job has not answered rank {self.rank} for {self._silence:.0f} s "
                f"(give_up={give_up:g}): its process, rank 0 or the launcher, is suspended, or its "
                "machine hangs. Look at that process, then restart the job from its last checkpoint"
            )
        # The process that holds the store has ended, or a record is cut short.
        except (RuntimeError, ValueError):
            return ""
        for rank, record in records.items():
            if rank not in self._seen or self._seen[rank][0].beat != record.beat:
                self._seen[rank] = record, self.pulse.clock
        return why

    def issued(self, rank: int, group: str) -> int | None:
        """Return how many collectives of a group a rank had issued at the last look, if known."""
        record, _ = self._seen.get(rank, (None, 0.0))
        return None if record is None else record.counts.get(group)

    def show(self, **changes: Any) -> Record:
        """Write this rank's record with some changes, and return it."""
        return self.ask(functools.partial(_write_record, self.pulse, **changes))

    def _look(self, wait: Wait, detector: Detector | None) -> dict[int, Record]:
        """Write this rank's record; return it and those of the ranks that it waits for.

        Those for which they wait in turn are among them, and so on.
        """
        self._looks += 1
        # Why only those of this thread: another thread may still issue collectives on its axes.
        threads = 0, threading.get_ident()
        counts: dict[str, int | None] = dict(self._counts)
        for group_name, axis_detector in list(self._detectors.items()):
            is_own = axis_detector.thread in threads
            counts[group_name] = axis_detector.number if is_own else None
        titles = {} if detector is None else detector.titles()
        own_record = self.pulse.record._replace(wait=wait)
        if wait.number:  # else another thread may wait in a collective, and show that
            own_record = self.show(
                look=self._looks, wait=wait, counts=counts, titles=titles, why=""
            )
        records, followed = {self.rank: own_record}, [own_record]
        for record in followed:  # which grows meanwhile
            waited_ranks = record.wait.ranks
            # Why suspects first: a circle counts if a second look finds it again.
            suspects = [rank for rank in self._suspects if rank in waited_ranks]
            some_ranks = some_of(waited_ranks, self._looks, suspects)
            for rank in some_ranks:
                if rank in records or not (text := self.get(f"funcshard/{rank}")):
                    continue
                records[rank] = Record.of(text)
                # Note: a rank that has joined may be slow, but it is not what that rank waits for.
                if records[rank].lacks(record.wait) and len(followed) < _MOST_FOLLOWED:
                    followed.append(records[rank])
        return records

    def _told(self, ranks: Sequence[int], records: Mapping[int, Record]) -> str:
        """Return what a rank has found out that this rank waits for."""
        all_causes = [records[r].why for r in ranks if r != self.rank and r in records]
        return next(filter(None, all_causes), "")

    def _circle(self, records: Mapping[int, Record]) -> str:
        """Return an error message if ranks wait for each other."""
        self._suspects = _blocked_by(self.rank, records)
        # Why a second look: a rank may read old records. But ranks write again at each look, so a
        # circle whose records are all new the second time was one at the moment of the first look.
        lasting = {
            rank: record
            for rank, record in records.items()
            if rank in self._seen and record.lasts_since(self._seen[rank][0])
        }
        rank_lines = [
            f"rank {rank} waits for {records[rank].wait.what}, which rank {blocker} has not reached"
            for rank, blocker in _blocked_by(self.rank, lasting).items()
        ]
        if not rank_lines:
            return ""
        return f"{_CIRCLE}{'; '.join(some_lines(rank_lines, 'more ranks'))}; {SAME_ORDER}"

    def _lost(
        self,
        ranks: Sequence[int],
        records: Mapping[int, Record],
        give_up: float,
        is_away: Callable[[int], bool],
    ) -> str:
        """Return an error message if a rank is lost for ever."""
        reasons = []
        for rank, record in records.items():
            if rank == self.rank or rank not in ranks:
                continue
            if reason := self._why_lost(rank, record, give_up, is_away):
                reasons.append(reason)
        if not reasons:
            return ""
        reasons_text = "; ".join(some_lines(reasons, "more"))
        if all(_LEFT in reason for reason in reasons):
            return (
                f"{reasons_text}: rank {self.rank} waited for it to make a mesh; every rank has to "
                "make the same meshes in the same order, so read the log of that rank first"
            )
        return (
            f"{reasons_text}: rank {self.rank} waited for it and gives it up (give_up={give_up:g}). "
            "It was killed or suspended, or its machine hangs: read its log and the system's. "
            "Restart the job from its last checkpoint, or pass a larger give_up to init_mesh"
        )

    def _why_lost(
        self, rank: int, record: Record, give_up: float, is_away: Callable[[int], bool]
    ) -> str:
        machine_name, process, *_ = record.place
        process_text = f"process {process} on {machine_name}, last seen in {record.latest}"
        if record.left:
            return f"rank {rank} {_LEFT} ({process_text})" if is_away(rank) else ""
        if _has_ended(record.place):
            return f"the process of rank {rank} has ended ({process_text})"
        before, since = self._seen.get(rank, (record, self.pulse.clock))
        # Why this clock: it runs only while this rank's thread beats, so no pause of the whole job
        # counts.
        silent_seconds = self.pulse.clock - since
        # A rank that has not made the mesh of a short ``give_up`` yet beats less often.
        if record.beat != before.beat or silent_seconds < max(give_up, 2 * record.every):
            return ""
        return f"rank {rank} has given no sign of life for {silent_seconds:.0f} s ({process_text})"

    # --- process groups of axes that are gone -----------------------------------------------------

    def destroy_unused(self) -> None:
        """Destroy the process groups of axes that are gone.

        Call it where the ranks have left the collectives of a mesh that is gone.
        """
        # Why counted before: what is put back, or comes meanwhile, waits for the next call.
        for _ in range(len(self.unused)):
            group, comparison = self.unused.pop(0)
            if comparison is not None and not has_ended(comparison.work):
                self.unused.append((group, comparison))
                continue
            if comparison is not None:
                # Why: a work ends a little before gloo's thread frees its tensors.
                time.sleep(0.001)
            # Why the group first: torch joins gloo's threads when it destroys a group. A thread
            # that is still in a comparison needs Python's lock to free its tensors, and the join
            # holds it for ever. Until then the comparison keeps them.
            destroy_group(group)
            del group

    def finish(self, seconds: float) -> None:
        """Wait so long for the last comparisons of axes that are gone, at the process's end."""
        if (
            os.getpid() != self.pulse.record.place[1]
        ):  # a forked child has none of gloo's threads
            return
        # Why: the other ranks wait for this one's part, and Python then destroys all groups.
        end_time = time.monotonic() + seconds
        for _, comparison in list(self.unused):
            while (
                comparison is not None
                and not has_ended(comparison.work)
                and time.monotonic() < end_time
            ):
                time.sleep(0.001)


# Why: torch's calls that connect ranks return when all have connected, or after their timeout, of
# which gloo takes five if a rank is killed meanwhile.
def watched(
    connect: Callable[[], T], watch: Watch, ranks: Sequence[int], limits: Limits
) -> T:
    """Return ``connect()``, called on a thread, while this rank looks at the others.

    Arguments:
        connect: connects this rank to others, without the store of the watch, which may be locked
            while it waits.
        watch: that of this process.
        ranks: the global ranks that connect.
        limits: when this rank looks at the others, and gives one up.

    Raises:
        LostError: a rank is lost.
        Exception: ``connect`` raised it.
    """
    connected = concurrent.futures.Future[T]()

    def call() -> None:
        try:
            connected.set_result(connect())
        except BaseException as error:
            connected.set_exception(error)

    # Why a daemon: a call that waits in vain must not keep the process from ending.
    threading.Thread(target=call, name="funcshard connecting", daemon=True).start()
    look_seconds = limits.patience
    while not concurrent.futures.wait([connected], look_seconds).done:
        if why := watch.why(Wait(ranks=ranks), limits.give_up):
            raise LostError(why)
        look_seconds = limits.patience / 8
    return connected.result()


def name_of(purpose: str, ranks: Sequence[int]) -> str:
    """Return a short name for an action of some ranks, the same on each."""
    return f"{purpose} {hashlib.sha256(repr([*ranks]).encode()).hexdigest()[:16]}"


def some_of(ranks: Sequence[int], look: int, first: Sequence[int] = ()) -> Sequence[int]:
    """Return the ranks about which to read; of many, ``first`` and others at each ``look``."""
    if len(ranks) <= MOST_READ:
        return ranks
    # Why not all: each of a thousand ranks that wait would read a thousand texts from one store.
    first_index = look * MOST_READ
    other_ranks = [ranks[(first_index + i) % len(ranks)] for i in range(MOST_READ)]
    return list(dict.fromkeys((*first, *other_ranks)))


def check_process(process: int, rank: int) -> None:
    """Raise ``RuntimeError`` in a child that the process of a rank has forked."""
    # Why: a child shares the rank's connection to the store, so it must not call the store.
    if os.getpid() != process:
        raise RuntimeError(
            f"process {os.getpid()} was forked from process {process}, which is rank {rank}, and "
            "cannot take part in its collectives: keep the mesh out of forked workers, such as "
            "those of a DataLoader"
        )


# --- texts of errors ------------------------------------------------------------------------------


def _difference(own_rank: int, records: Mapping[int, Record], axis: str) -> str:
    """Return an error message about the first difference between ranks, or ``""``."""
    own_record = records[own_rank]
    for rank, record in sorted(records.items()):
        if record.wait.group != own_record.wait.group:
            continue
        for number, own_title in own_record.titles.items():
            other_title = record.titles.get(number, own_title)
            if other_title != own_title:
                return (
                    f"ranks issue different collectives: number {number} on mesh axis {axis!r} is "
                    f"{own_title} on rank {own_rank} and {other_title} on rank {rank}; {SAME_ORDER}"
                )
    return ""


def _blocked_by(own_rank: int, records: Mapping[int, Record]) -> dict[int, int]:
    """Return the ranks that block each other, from this one on, each with the next; or none."""
    blockers = dict.fromkeys(records, own_rank)
    number_before = 0
    while len(blockers) != number_before:  # else each of them waits for another one
        number_before = len(blockers)
        blockers = {
            rank: other_rank
            for rank in blockers
            for other_rank in blockers
            if other_rank != rank
            and other_rank in records[rank].wait.ranks
            and records[other_rank].lacks(records[rank].wait)
        }
    path: dict[int, int] = {}
    next_rank = own_rank
    while next_rank in blockers and next_rank not in path:
        path[next_rank] = blockers[next_rank]
        next_rank = path[next_rank]
    return path


def some_lines(lines: list[str], rest: str, most: int = _MOST_NAMED) -> list[str]:
    """Return the lines; of many, the first ones and how many the ``rest`` are."""
    return (
        lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most} {rest}"]
    )


# --- the thread -----------------------------------------------------------------------------------


def _beat(pulse: _Pulse) -> None:
    """Beat, and answer questions, until the watch or the store is gone."""
    last_time, last_beat = time.monotonic(), -math.inf
    while not pulse.ended and not pulse.fault:
        question = None
        seconds_left = min(last_beat + pulse.every - last_time, pulse.look_every)
        with contextlib.suppress(queue.Empty):
            question = pulse.questions.get(timeout=max(0.0, seconds_left))
        current_time, every = time.monotonic(), pulse.every
        # Why the minimum: no time counts in which this process was suspended.
        pulse.clock += min(current_time - last_time, 2 * every)
        last_time = current_time
        if current_time >= last_beat + every and not pulse.ended:
            _answer(pulse, functools.partial(_write_record, pulse))
            last_beat = current_time
        if question is not None:
            _answer(pulse, *question)
        if (log := pulse.attempt) is not None:
            _answer(pulse, log.look)
        del log  # which keeps the watch
    _answer(pulse, functools.partial(_write_record, pulse, left=True))
    # Why before the last answers: whoever asks from here on raises, and waits for nothing.
    pulse.fault = pulse.fault or "the watch has ended"
    with contextlib.suppress(queue.Empty):
        while True:
            if question := pulse.questions.get_nowait():
                _answer(pulse, *question)


def _answer(
    pulse: _Pulse, call: Callable[[Any], Any], answer: Answer | None = None
) -> None:
    """Make a call of the store, and give its result or error as the answer."""
    answer = answer or concurrent.futures.Future()
    if not answer.set_running_or_notify_cancel():  # the thread that asked waits no more
        return
    try:
        answer.set_result(_call(pulse, call))
    # Why every error: if it ended the thread, other ranks would give up a rank that works.
    except Exception as error:
        answer.set_exception(
            error.with_traceback(None)
        )  # else it and this frame hold each other


def _call(pulse: _Pulse, call: Callable[[Any], T]) -> T:
    # Why asked before each call: one to a file that is gone takes minutes.
    if not pulse.fault and store_is_gone(pulse.store):
        pulse.fault = "the store of the job is gone"
    if pulse.fault:
        raise RuntimeError(pulse.fault)
    try:
        return call(pulse.store)
    except RuntimeError as error:
        # A connection may have been cut, such as by a router that forgets those that are idle.
        try:
            pulse.store = reconnected(pulse.store)
            return call(pulse.store)
        except ConnectionRefusedError:
            pulse.fault = str(error)
            raise RuntimeError(pulse.fault) from None
        except (
            RuntimeError,
            OSError,
        ) as next_error:  # not known: the next call tries it again
            raise SilentStoreError(str(next_error)) from None


def write_text(store: Any, key: str, text: str) -> None:
    """Write a text into a store."""
    store.set(key, text)
    # Why: torch waits for no answer to a text, so a connection that is cut may lose it.
    store.check([key])


def _write_record(pulse: _Pulse, store: Any, **changes: Any) -> Record:
    record, latest = pulse.record, pulse.record.latest
    if pulse.latest is not None:
        axis, number, entry = pulse.latest
        latest = f"{title_of(entry)}, collective number {number} on mesh axis {axis!r}"
    changes |= {"beat": record.beat + 1, "every": pulse.every, "latest": latest}
    pulse.record = record._replace(**changes)
    write_text(store, pulse.key, json.dumps(pulse.record))
    return pulse.record


def _stop(pulse: _Pulse, thread: threading.Thread, process: int) -> None:
    if (
        os.getpid() != process
    ):  # a forked child has no such thread, and its locks may be taken
        return
    pulse.ended = True
    pulse.questions.put(None)
    if thread is not threading.current_thread():
        # Why no longer: a call of a suspended store never returns.
        thread.join(2 * _ANSWER)


# --- processes ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _place_of(process: int) -> Sequence[Any]:
    """Return the names by which the processes of one machine find this one.

    Returns:
        Name of the machine, number of this process, an exact name of the machine with the namespace
        of the number, and the time when the process began; the last two may be ``""``.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        process_space = f"{boot_id} {os.readlink('/proc/self/ns/pid')}"
        return socket.gethostname(), process, process_space, _state_of(process)[1]
    except OSError:
        return socket.gethostname(), process, "", ""


def _state_of(process: int) -> tuple[str, str]:
    """Return the state of a process of this machine, and when it began."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def _has_ended(place: Sequence[Any]) -> bool:
    """Return whether a process of this machine is known to have ended."""
    _, process, process_space, begin_time = place
    if not process_space or process_space != _place_of(os.getpid())[2]:
        return False
    try:
        state, found_time = _state_of(process)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    # Why the time too: the system may have given the number to another process.
    return state in "ZX" or found_time != begin_time
