"""Ranks meet before they make the groups of a mesh, and look for lost ranks while they connect.

torch.distributed makes a process group without a look at the other ranks: one that makes another
mesh than the rest would wait until a timeout. So the ranks of a mesh first ``meet`` in the job's
store. Each writes the facts of its mesh; the first compares all, and writes the answer.

torch's calls that connect ranks return when all have connected, or after their timeout, of which
gloo takes five if a rank is killed meanwhile. So a thread makes the call, and the rank itself looks
at the signs of life of the others (``watched``).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from funcshard.comm.agreement import first_difference
from funcshard.comm.journal import Journal, Wait
from funcshard.comm.liveness import LIMITS, Heart, Limits, LostError, SilentStoreError

T = TypeVar("T")

# Number of ranks that an error names.
_MOST_NAMED = 8

# Seconds between two looks into the store: the first ones are short, because ranks of one program
# come at about the same time; the last ones spare the one store that all ranks ask.
_SHORTEST, _LONGEST = 0.001, 0.1


def meet(
    journal: Journal,
    ranks: Sequence[int],
    call: str,
    facts: Mapping[str, str],
    *,
    timeout: float,
    limits: Limits = LIMITS,
) -> None:
    """Return once all ranks have called this with equal ``facts``.

    Arguments:
        journal: the waits of this rank.
        ranks: the global ranks that meet; each has to call this with the same ranks.
        call: the action that they are about to begin, for errors.
        facts: texts by name, which are compared in this order.
        timeout: seconds after which a rank that has not come is an error.
        limits: when this rank looks at the others, and gives one up.

    Raises:
        ValueError: the facts of two ranks differ, on every rank.
        RuntimeError: a rank has not come in time, ranks wait for each other elsewhere, or the store
            of the job cannot be reached.
    """
    group = name_of("meeting", ranks)
    meeting = _Meeting(journal, ranks, group, journal.count(group), call, dict(facts))
    try:
        difference = meeting.wait(timeout, limits)
        # All ranks have come here, so all have read the answer of the meeting before.
        meeting.forget_previous()
    except LostError as late:
        raise RuntimeError(str(late)) from None
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {journal.rank} cannot reach the store of the job in {call}: the process that "
            "holds it, rank 0 or the launcher, has ended; read its log first. Communication ended "
            f"with: {error}"
        ) from error
    if difference:
        raise ValueError(difference)


def name_of(purpose: str, ranks: Sequence[int]) -> str:
    """Return a short name for an action of some ranks, the same on each."""
    return f"{purpose} {hashlib.sha256(repr([*ranks]).encode()).hexdigest()[:16]}"


@dataclass(slots=True)
class _Meeting:
    """A meeting of some ranks in the store.

    Attributes:
        journal, ranks, call, facts: see ``meet``.
        group: name of the meetings of these ranks.
        number: of the meeting, among these.
        told: whether this rank has written its facts.
        rows: the facts of the ranks, as far as the first rank has read them.
    """

    journal: Journal
    ranks: Sequence[int]
    group: str
    number: int
    call: str
    facts: dict[str, str]
    told: bool = False
    rows: list[dict[str, str]] = field(default_factory=list)

    @property
    def store(self) -> Any:
        return self.journal.store if self.journal.heart is None else self.journal.heart.store

    def key(self, whose: object, before: int = 0) -> str:
        return f"{self.group}/{self.number - before}/{whose}"

    def wait(self, timeout: float, limits: Limits) -> str:
        """Return the answer of the first rank, once all have come."""
        # Why no wait of the store: that of a file asks once a second.
        begin_time = current_time = time.monotonic()
        next_look, sleep_seconds, serial = begin_time + limits.patience, _SHORTEST, None
        while True:
            is_silent = False
            try:
                answer = self._ask()
                if answer is not None:
                    return answer
            except SilentStoreError:
                is_silent = True
            if current_time >= begin_time + timeout:
                raise LostError(self._late(timeout))
            if current_time >= next_look:
                serial = self.journal.begin_wait() if serial is None else serial
                self._look(serial, limits.give_up, is_silent)
                next_look = current_time + limits.patience / 8
            # Ranks of one program come soon, and others spare the store.
            time.sleep(sleep_seconds)
            sleep_seconds, current_time = min(1.5 * sleep_seconds, _LONGEST), time.monotonic()

    def _look(self, serial: int, give_up: float, silent: bool) -> None:
        """Raise ``LostError`` if this rank waits in vain."""
        journal, lost_text = self.journal, ""
        other_ranks = [rank for rank in self.ranks if rank != journal.rank]
        if not silent:
            call_title = f"{self.call}, number {self.number} of these ranks"
            lost_text = journal.find_circle(
                Wait(self.group, self.number, call_title, other_ranks, serial)
            )
        if not lost_text and journal.heart is not None:
            lost_text = journal.heart.find_lost(other_ranks, give_up, self._is_away)
        if lost_text:
            journal.close_connections()
            raise LostError(lost_text)

    def _ask(self) -> str | None:
        """Return the answer; ``None`` if ranks have not come yet."""
        store, own_rank, answer_key = self.store, self.journal.rank, self.key("answer")
        if not self.told:
            store.set(self.key(own_rank), json.dumps(self.facts))
            self.told = True
        # Why the first rank alone: each of a thousand would read a thousand texts.
        if own_rank != self.ranks[0]:
            return store.get(answer_key).decode() if store.check([answer_key]) else None
        if not self.rows and not store.check([self.key(rank) for rank in self.ranks]):
            return None
        # Note: after an answer that came too late, it goes on where it was.
        for rank in self.ranks[len(self.rows) :]:
            self.rows.append(json.loads(store.get(self.key(rank))))
        difference = first_difference(self.rows, self.ranks)
        store.set(answer_key, difference)
        return difference

    def forget_previous(self) -> None:
        """Delete what this rank wrote for the meeting before."""
        own_rank = self.journal.rank
        with contextlib.suppress(RuntimeError):
            if self.number > 1:
                self.store.delete_key(self.key(own_rank, before=1))
                if own_rank == self.ranks[0]:
                    self.store.delete_key(self.key("answer", before=1))

    def _is_away(self, rank: int) -> bool:
        """Return whether a rank has not come, or not told what it found out."""
        has_answered = rank != self.ranks[0] or self.store.check([self.key("answer")])
        return not has_answered or not self.store.check([self.key(rank)])

    def _late(self, timeout: float) -> str:
        missing_ranks = list[int]()
        with contextlib.suppress(SilentStoreError):
            missing_ranks += [rank for rank in self.ranks if not self.store.check([self.key(rank)])]
        ranks_text = ", ".join(map(str, missing_ranks[:_MOST_NAMED])) + ", and others" * (
            len(missing_ranks) > _MOST_NAMED
        )
        return (
            f"rank {self.journal.rank} waited {timeout:g} s in {self.call}, which is number "
            f"{self.number} of these ranks, and rank {ranks_text or self.ranks[0]} has not come: "
            "every rank has to make the same meshes in the same order; read the log of the rank that is "
            "missing, or pass a larger timeout if it is slow"
        )


def watched(connect: Callable[[], T], heart: Heart, ranks: Sequence[int], limits: Limits) -> T:
    """Return ``connect()``, called on a thread, while this rank looks at the others.

    Arguments:
        connect: connects this rank to others, without the store of the heart, which may be locked
            while it waits.
        heart: the signs of life of this process.
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
        if lost_text := heart.find_lost(ranks, limits.give_up):
            raise LostError(lost_text)
        look_seconds = limits.patience / 8
    return connected.result()
