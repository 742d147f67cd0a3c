"""Signs of life: find ranks that are suspended or gone, and say so on every rank that waits.

A rank that waits cannot tell a slow rank from one that is suspended, whose machine hangs, or that
was killed while a child that it forked still holds its connections. So a thread of each process,
its ``Heart``, writes a *beat* into the job's store every few seconds: a number that grows, and the
latest collective.

A rank that has waited longer than ``patience`` looks at the beats of the ranks that it waits for,
and gives a rank up in two cases:

- The beat has stayed the same for ``give_up`` seconds.
- The rank runs on the same machine, and its process has ended without a farewell, which a process
  that ends by itself writes as its last beat. After a farewell a rank is lost only if ranks wait
  for it to make a mesh: in a collective, its part may have come before.

The rank writes its finding into the store, where all other ranks that wait read it. So they end
together, and name the same rank. A rank that computes, compiles, or sits at a breakpoint beats, and
is never given up.

A call of a store whose process is suspended never returns. So the heart's thread makes all calls of
the store, and a rank waits a second for an answer.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from funcshard._utils.torch_groups import reconnected, store_for_thread, store_is_gone

T = TypeVar("T")

# Seconds between two beats: at most the first number, and at least so many beats in ``give_up``.
_LONGEST, _BEATS = 5.0, 8

# Number of ranks that a rank reads about in one look, and that an error describes.
MOST_READ, _MOST_NAMED = 64, 8

# Seconds that the store may take for one answer before it counts as silent.
_ANSWER = 1.0

_FAREWELL, _FOUND = "farewell", "given up"
_LEFT = "has left the job"


class Detector(Protocol):
    """The part of a ``DesyncDetector`` that a heart and a journal use."""

    number: int
    thread: int
    closed: bool

    def latest(self) -> str:
        """Return the latest collective as text."""

    def close_connections(self) -> None:
        """Close this rank's connections on the axis."""


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


@dataclass(slots=True, eq=False)
class _Question:
    """A call of the store that the heart's thread makes for another thread.

    Attributes:
        call: takes the store, and returns the answer.
        answers: takes the answer, or the error of the call.
        late: whether the asking thread waits no more.
    """

    call: Callable[[Any], Any]
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = field(
        default_factory=queue.SimpleQueue
    )
    late: bool = False


@dataclass(slots=True)
class _Pulse:
    """The state that a heart shares with its thread, which must not keep the heart alive.

    Attributes:
        store: the store, for the thread.
        key: the key of this rank's beat.
        every: seconds between two beats.
        number: how many beats were written.
        clock: seconds that this process has lived with a heart, without pauses.
        detectors: each detector of this process, and its number of collectives at the last beat.
        latest: the latest collective as text.
        questions: calls of the store for other threads; ``None`` asks for a beat.
        ended: whether the thread has to end.
        fault: why the thread has ended, if the process that holds the store has.
    """

    store: Any
    key: str
    every: float = _LONGEST
    number: int = 0
    clock: float = 0.0
    detectors: list[tuple[weakref.ref[Detector], int]] = field(default_factory=list)
    latest: str = "no collective yet"
    # Why a SimpleQueue: Python may collect a heart, and stop it, on any thread and between any two
    # instructions. No lock of Python's code outlasts that.
    questions: queue.SimpleQueue[_Question | None] = field(default_factory=queue.SimpleQueue)
    ended: bool = False
    fault: str = ""


class Heart:
    """The signs of life of this process, and a look at those of other ranks.

    Arguments:
        rank: global rank of this process.
        store: the store of the job.
        prefix: of the keys of the beats.
    """

    def __init__(self, rank: int, store: Any, prefix: str = "") -> None:
        self._rank, self._prefix = rank, prefix
        self._pulse = _Pulse(store_for_thread(store), self.store.key(rank))
        # The beat of each rank, and the clock when it was new.
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._silence = 0.0  # seconds for which the store has not answered
        self._last_question = 0.0
        self._looks = 0
        thread = threading.Thread(
            target=_beat, args=(self._pulse,), name="funcshard heart", daemon=True
        )
        thread.start()
        # Why joined at the end of the process: Python ends daemon threads in the middle of torch's
        # code, which then ends the process with an error.
        weakref.finalize(self, _stop, self._pulse, thread, os.getpid())
        # Why waited for: ranks that connect to this one look at its beat if it ends meanwhile.
        with contextlib.suppress(RuntimeError):
            self.ask(lambda store: None)

    @property
    def store(self) -> StorePart:
        """The part of the store with the beats."""
        # Why not kept: the two would hold each other, and the heart would beat until Python looks
        # for such garbage.
        return self.part(self._prefix)

    def watch(self, detector: Detector, give_up: float) -> None:
        """Beat often enough for ``give_up``, and with the collectives of one more detector."""
        pulse = self._pulse
        # The shortest ``give_up`` of all meshes of this process decides.
        pulse.every = min(pulse.every, give_up / _BEATS)
        living_detectors = [watched for watched in pulse.detectors if watched[0]() is not None]
        pulse.detectors = [*living_detectors, (weakref.ref(detector), 0)]
        pulse.questions.put(None)

    def part(self, prefix: str) -> StorePart:
        """Return the part of the job's store whose keys begin with ``prefix``."""
        return StorePart(self, prefix)

    def ask(self, call: Callable[[Any], T]) -> T:
        """Return ``call(store)``, made by the heart's thread.

        Raises:
            SilentStoreError: there is no answer within a second.
            RuntimeError: the process that holds the store has ended.
            Exception: ``call`` raised it.
        """
        pulse, question = self._pulse, _Question(call)
        begin_time, answer, error = time.monotonic(), None, None
        try:
            if not pulse.ended:
                pulse.questions.put(question)
                answer, error = question.answers.get(timeout=_ANSWER)
            elif pulse.fault:
                error = RuntimeError(pulse.fault)
            else:
                raise queue.Empty
        except queue.Empty:
            question.late = True
            error = SilentStoreError(f"the store of the job has not answered for {_ANSWER:g} s")
        current_time = time.monotonic()
        # Why the minimum: no time counts in which this process was suspended.
        waited_seconds = min(current_time - begin_time, _ANSWER)
        silent_between = min(begin_time - self._last_question, _LONGEST) if self._silence else 0.0
        self._silence = (
            self._silence + waited_seconds + silent_between
            if isinstance(error, SilentStoreError)
            else 0.0
        )
        self._last_question = current_time
        if error is not None:
            try:
                raise error
            finally:
                # Why: its traceback holds this frame, and this frame would hold it. The heart would
                # beat on, after its rank has left, until Python looks for such garbage.
                del error
        return answer  # type: ignore[return-value]

    def find_lost(
        self,
        ranks: Sequence[int],
        give_up: float,
        is_away: Callable[[int], bool] = lambda rank: False,
    ) -> str:
        """Return an error message if a rank is lost for ever, or the store; ``""`` if not.

        Arguments:
            ranks: the global ranks for which this rank waits; without any, it reads what others
                have found.
            give_up: seconds without a sign of life after which a rank is lost.
            is_away: returns whether a rank is lost that has left the job by itself.
        """
        try:
            # Why first: so all ranks that wait end together, and name the same rank.
            lost_text = self._finding()
            if not lost_text:
                self._looks += 1
                other_ranks = [rank for rank in some_of(ranks, self._looks) if rank != self._rank]
                all_reasons = {rank: self._why_lost(rank, give_up, is_away) for rank in other_ranks}
                lost_reasons = {rank: why for rank, why in all_reasons.items() if why}
                if lost_reasons:
                    lost_text = _message(lost_reasons, self._rank, give_up)
                    beats = {rank: self._seen[rank][0].decode() for rank in lost_reasons}
                    self.store.set(_FOUND, json.dumps([lost_text, beats]))
        except SilentStoreError:
            if self._silence < give_up:
                return ""
            return (
                f"the store of the job has not answered rank {self._rank} for {self._silence:.0f} "
                f"s (give_up={give_up:g}): the process that holds it, which is rank 0 or the "
                "launcher, is suspended, or its machine hangs; look at that process, then start "
                "the job again from its last checkpoint"
            )
        except (RuntimeError, ValueError):  # the process that holds the store has ended
            return ""
        return lost_text

    def _finding(self) -> str:
        """Return the error message of a rank that has given another one up, or ``""``."""
        lost_text, beats = json.loads(read(self.store, _FOUND) or '["", {}]')
        # A rank that beats again is no longer given up.
        still_lost = all(read(self.store, rank) == beat.encode() for rank, beat in beats.items())
        return str(lost_text) if still_lost else ""

    def _why_lost(self, rank: int, give_up: float, is_away: Callable[[int], bool]) -> str:
        """Return why a rank is lost, or ``""``."""
        beat, clock = read(self.store, rank), self._pulse.clock
        # A new beat, so the silence begins anew.
        if beat != self._seen.get(rank, (b"", 0.0))[0]:
            self._seen[rank] = beat, clock
        if not beat:  # it has made no mesh yet
            return ""
        beat_count, latest_collective, (machine_name, process, *place), *beat_intervals = (
            json.loads(beat)
        )
        process_text = f"process {process} on {machine_name}, last seen in {latest_collective}"
        if beat_count == _FAREWELL:
            return f"rank {rank} {_LEFT} ({process_text})" if is_away(rank) else ""
        # Why this clock: it runs only while this rank's heart beats, so no pause of the whole job
        # counts.
        silent_seconds = clock - self._seen[rank][1]
        if _has_ended(process, place):
            return f"the process of rank {rank} has ended ({process_text})"
        # A rank that has not made the mesh of a short ``give_up`` yet beats less often.
        if silent_seconds < max(
            [give_up, *(2 * beat_interval for beat_interval in beat_intervals)]
        ):
            return ""
        return f"rank {rank} has given no sign of life for {silent_seconds:.0f} s ({process_text})"


@dataclass(frozen=True, slots=True)
class StorePart:
    """The keys of the job's store with one prefix; each call ends within a second.

    Methods are those of a ``torch.distributed`` store, and raise what ``Heart.ask`` raises.
    """

    heart: Heart
    prefix: str

    def key(self, name: object) -> str:
        return f"{self.prefix}/{name}" if self.prefix else str(name)

    def part(self, name: str) -> StorePart:
        return StorePart(self.heart, self.key(name))

    def set(self, name: str, text: str) -> None:
        def write(store: Any) -> None:
            store.set(self.key(name), text)
            # Why: torch waits for no answer to a text, so a connection that is cut may lose it.
            store.check([self.key(name)])

        self.heart.ask(write)

    def get(self, name: str) -> bytes:
        answer: bytes = self.heart.ask(lambda store: store.get(self.key(name)))
        return answer

    def check(self, names: Sequence[str]) -> bool:
        return bool(self.heart.ask(lambda store: store.check([self.key(name) for name in names])))

    def delete_key(self, name: str) -> None:
        self.heart.ask(lambda store: store.delete_key(self.key(name)))


def read(store: Any, name: object) -> bytes:
    """Return a text of a store, or ``b""``."""
    return store.get(str(name)) if store.check([str(name)]) else b""


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


def _beat(pulse: _Pulse) -> None:
    """Beat, and answer questions, until the heart or the store is gone."""
    last_time, beat_due = time.monotonic(), 0.0
    while not pulse.ended:
        question = None  # nothing in time, or a request to beat
        with contextlib.suppress(queue.Empty):
            question = pulse.questions.get(timeout=max(0.0, beat_due - last_time))
        current_time = time.monotonic()
        # Why the minimum: no time counts in which this process was suspended.
        pulse.clock += min(current_time - last_time, 2 * pulse.every)
        last_time = current_time
        if not pulse.ended and (question is None or current_time >= beat_due):
            _call(pulse, lambda store: _write_beat(pulse, store))
            beat_due = current_time + pulse.every
        if question is not None and not question.late:
            question.answers.put(_call(pulse, question.call))
    if not pulse.fault:
        farewell = json.dumps([_FAREWELL, pulse.latest, _place_of(os.getpid())])
        _call(pulse, lambda store: store.set(pulse.key, farewell))
    with contextlib.suppress(queue.Empty):
        while True:
            if question := pulse.questions.get_nowait():
                question.answers.put((None, RuntimeError(pulse.fault or "the heart has stopped")))


def _call(pulse: _Pulse, call: Callable[[Any], Any]) -> tuple[Any, Exception | None]:
    """Return the result of a call of the store, and its error."""
    for attempt in range(2):
        try:
            # Why asked before each call: one to a file that is gone takes minutes.
            if pulse.fault or store_is_gone(pulse.store):
                pulse.ended, pulse.fault = True, pulse.fault or "the store of the job is gone"
                return None, RuntimeError(pulse.fault)
            return call(pulse.store), None
        # Why every error: if it ended the thread, other ranks would give up a rank that works.
        except Exception as caught:
            error = caught.with_traceback(None)  # else it and this frame hold each other
            if attempt or not isinstance(error, RuntimeError):
                break
            # A connection may have been cut, such as by a router that forgets those that are idle.
            try:
                pulse.store = reconnected(pulse.store)
            except ConnectionRefusedError:
                pulse.ended, pulse.fault = True, str(error)
            except (RuntimeError, OSError):  # not known: the next call tries it again
                break
    if isinstance(error, RuntimeError) and not pulse.fault:
        error = SilentStoreError(str(error))
    return None, error


def _write_beat(pulse: _Pulse, store: Any) -> None:
    # Why a name for the list: a thread that makes a mesh may replace it meanwhile by a shorter one.
    detectors = pulse.detectors
    for at, (detector_reference, detector_count) in enumerate(detectors):
        detector = detector_reference()
        if detector is not None and detector.number != detector_count:
            pulse.latest = detector.latest()
            detectors[at] = detector_reference, detector.number
    pulse.number += 1
    beat = [pulse.number, pulse.latest, _place_of(os.getpid()), pulse.every]
    store.set(pulse.key, json.dumps(beat))


def _stop(pulse: _Pulse, thread: threading.Thread, process: int) -> None:
    if os.getpid() != process:  # a forked child has no such thread, and its locks may be taken
        return
    pulse.ended = True
    pulse.questions.put(None)
    if thread is not threading.current_thread():
        thread.join(2 * _ANSWER)


@functools.lru_cache(maxsize=1)
def _place_of(process: int) -> list[Any]:
    """Return the names by which the processes of one machine find this one.

    Returns:
        Name of the machine, number of this process, an exact name of the machine with the namespace
        of the number, and the time when the process began; the last two may be ``""``.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        process_space = f"{boot_id} {os.readlink('/proc/self/ns/pid')}"
        return [socket.gethostname(), process, process_space, _began(process)]
    except OSError:
        return [socket.gethostname(), process, "", ""]


def _began(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]


def _has_ended(process: int, place: list[str]) -> bool:
    """Return whether a process of this machine is known to have ended."""
    _, _, own_space, _ = _place_of(os.getpid())
    if not own_space or own_space != place[0] or not hasattr(os, "pidfd_open"):
        return False
    try:
        process_file = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        # Why the time too: the system may have given the number to another process.
        if _began(process) != place[1]:
            return True
        poll = select.poll()
        poll.register(process_file, select.POLLIN)
        return bool(poll.poll(0))  # it can be read once all threads of the process have ended
    except OSError:
        return False
    finally:
        os.close(process_file)


def _message(lost: dict[int, str], rank: int, give_up: float) -> str:
    reasons = [*lost.values()]
    all_left = all(_LEFT in reason for reason in reasons)
    if len(reasons) > _MOST_NAMED:
        reasons[_MOST_NAMED:] = [f"and {len(reasons) - _MOST_NAMED} more"]
    if all_left:
        return (
            f"{'; '.join(reasons)}: rank {rank} waited for it to make a mesh; every rank has to "
            "make the same meshes in the same order, so read the log of that rank first"
        )
    return (
        f"{'; '.join(reasons)}: rank {rank} waited for it and gives it up (give_up={give_up:g}); "
        "read the log of that rank and the system's log of its machine first: it was killed or "
        "suspended, or its machine or disk hangs; then start the job again from its last "
        "checkpoint, or pass a larger give_up to init_mesh if such a pause is to be waited for"
    )
