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
from dataclasses import dataclass
from typing import Any, TypeVar

from funcshard._utils.options import some
from funcshard.comm.agreement import first_difference
from funcshard.comm.watch import (
    LIMITS,
    Limits,
    LostError,
    SilentStoreError,
    Wait,
    Watch,
    write_text,
)

T = TypeVar("T")

# Seconds between two looks into the store: the first ones are short, because ranks of one program
# come at about the same time; the last ones spare the one store that all ranks ask.
_SHORTEST, _LONGEST = 0.001, 0.1


def meet(
    watch: Watch,
    ranks: Sequence[int],
    call: str,
    facts: Mapping[str, str],
    *,
    timeout: float,
    limits: Limits = LIMITS,
) -> None:
    """Return once all ranks have called this with equal ``facts``.

    Arguments:
        watch: that of this process.
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
    meeting = _Meeting(watch, ranks, group, watch.count(group), call, dict(facts))
    try:
        difference = meeting.wait(timeout, limits)
        # All ranks have come here, so all have read the answer of the meeting before.
        with contextlib.suppress(RuntimeError):
            watch.ask(meeting.forget_previous)
    except LostError as late:
        raise RuntimeError(str(late)) from None
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {watch.rank} cannot reach the store of the job in {call}: the process that "
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
        watch, ranks, call, facts: see ``meet``.
        group: name of the meetings of these ranks.
        number: of the meeting, among these.
        told: whether this rank has written its facts.
    """

    watch: Watch
    ranks: Sequence[int]
    group: str
    number: int
    call: str
    facts: dict[str, str]
    told: bool = False

    def key(self, whose: object, before: int = 0) -> str:
        return f"funcshard/{self.group}/{self.number - before}/{whose}"

    def wait(self, timeout: float, limits: Limits) -> str:
        """Return the answer of the first rank, once all have come."""
        # Why no wait of the store: that of a file asks once a second.
        begin_time = current_time = time.monotonic()
        next_look, sleep_seconds = begin_time + limits.patience, _SHORTEST
        while True:
            # Why suppressed: the store may answer later, and a look says if it does not.
            with contextlib.suppress(SilentStoreError):
                answer = self.watch.ask(self.answer)
                if answer is not None:
                    return answer
            if current_time >= begin_time + timeout:
                raise LostError(self._late(timeout))
            if current_time >= next_look:
                self._look(limits.give_up)
                next_look = current_time + limits.patience / 8
            # Ranks of one program come soon, and others spare the store.
            time.sleep(sleep_seconds)
            sleep_seconds, current_time = min(1.5 * sleep_seconds, _LONGEST), time.monotonic()

    def _look(self, give_up: float) -> None:
        """Raise ``LostError`` if this rank waits in vain."""
        other_ranks = [rank for rank in self.ranks if rank != self.watch.rank]
        call_title = f"{self.call}, number {self.number} of these ranks"
        wait = Wait(self.group, self.number, call_title, other_ranks)
        if why := self.watch.why(wait, give_up, is_away=self._is_away):
            self.watch.close_connections()
            raise LostError(why)

    def answer(self, store: Any) -> str | None:
        """Write this rank's facts, and return the answer; ``None`` if ranks have not come yet."""
        answer_key = self.key("answer")
        if not self.told:
            write_text(store, self.key(self.watch.rank), json.dumps(self.facts))
            self.told = True
        # The first rank finds its answer here too if that came too late.
        if store.check([answer_key]):
            return str(store.get(answer_key).decode())
        fact_keys = [self.key(rank) for rank in self.ranks]
        # Why the first rank alone: each of a thousand would read a thousand texts.
        if self.watch.rank != self.ranks[0] or not store.check(fact_keys):
            return None
        difference = first_difference([json.loads(store.get(key)) for key in fact_keys], self.ranks)
        write_text(store, answer_key, difference)
        return difference

    def forget_previous(self, store: Any) -> None:
        """Delete what this rank wrote for the meeting before."""
        if self.number > 1:
            store.delete_key(self.key(self.watch.rank, before=1))
            if self.watch.rank == self.ranks[0]:
                store.delete_key(self.key("answer", before=1))

    def _is_away(self, rank: int) -> bool:
        """Return whether a rank has not come, or not told what it found out."""
        needed_keys = [self.key(rank), *[self.key("answer")] * (rank == self.ranks[0])]
        return not self.watch.check(needed_keys)

    def _late(self, timeout: float) -> str:
        missing_ranks = list[int]()
        with contextlib.suppress(SilentStoreError):
            missing_ranks += [rank for rank in self.ranks if not self.watch.check([self.key(rank)])]
        return (
            f"rank {self.watch.rank} waited {timeout:g} s in {self.call}, which is number "
            f"{self.number} of these ranks, and rank {some(missing_ranks) or self.ranks[0]} has not come: "
            "every rank has to make the same meshes in the same order; read the log of the rank that is "
            "missing, or pass a larger timeout if it is slow"
        )


def watched(connect: Callable[[], T], watch: Watch, ranks: Sequence[int], limits: Limits) -> T:
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
        if why := watch.why(Wait("", 0, "", ranks), limits.give_up):
            raise LostError(why)
        look_seconds = limits.patience / 8
    return connected.result()
