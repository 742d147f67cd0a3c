"""Find ranks that issue different collectives, and say where they differ.

gloo does not check that all ranks issue the same collectives in the same order: ranks that differ
read wrong numbers, wait for a timeout, or die. A ``DesyncDetector`` records the collectives of one
rank on one axis, and checks them against those of all other ranks in four ways:

- History. Every message through shared memory (``shm``) carries a hash of all collectives that its
  sender has issued, which the receiver compares before it reads any data. The next two checks are
  for gloo and NCCL, whose messages have no room for it.
- Agreement. A context is a collective and the seven before it, without their sizes. In a new
  context, or before one of a collective's first eight sizes, the ranks compare their histories, and
  wait for the answer, before data moves. They do so in a gloo group for that alone.
- Comparison. Every 16 collectives the ranks compare their histories without waiting.
- Diagnosis. A rank that waits for long, or whose collective fails, asks its ``watch`` why.

On ranks of equal programs the same contexts are new, and all of them appear in the first two steps,
so later steps do not wait.

One desync is not found. On gloo, two ranks that differ in known contexts, with messages of
different size, reach gloo before the next comparison. gloo then ends one process, and the remaining
ranks say in which collective they waited.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import logging
import os
import socket
import sys
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from funcshard._utils.torch_groups import abort_group, has_ended
from funcshard.comm.watch import (
    LIMITS,
    MOST_READ,
    SAME_ORDER,
    Comparison,
    Entry,
    Limits,
    Wait,
    Watch,
    check_process,
    some_lines,
    title_of,
)

_log = logging.getLogger("funcshard.comm")

# Number of collectives between two comparisons.
COMPARE_EVERY = 16

# Number of collectives that a detector remembers; it must cover the last two comparisons.
KEPT = 64

# Number of collectives in a row that make up a context.
CONTEXT_LENGTH = 8

# Number of contexts that the ranks agree on. A program with more contexts keeps making new ones,
# and would wait before every collective.
MOST_CONTEXTS = 4096

# Number of sizes of one collective that the ranks agree on. A collective with more sizes keeps
# having new ones, as the sum of a batch of another length in every step does.
MOST_SIZES = 8

# Fills up the texts that ranks gather: a byte that no text in UTF-8 has.
_PADDING = b"\xff"

# Bits of a history, and of the hash of a text.
MASK = (1 << 62) - 1


@dataclass(eq=False, repr=False)
class DesyncDetector:
    """The collectives that one rank has issued on one mesh axis, with checks against other ranks.

    Attributes:
        axis: name of the mesh axis, for errors.
        ranks: global rank of each rank of the axis, for errors.
        rank: position of this rank in ``ranks``.
        control: the gloo process group for comparisons, if any.
        watch: the watch of this process; ``None`` for no diagnosis.
        limits: how long a wait may take before this rank looks at the others.
        groups: gloo groups whose connections this rank closes before it raises.
        connections: sockets that it closes.
        aborted: groups of other backends that it aborts.
        name: of the group in the records of ranks; by default that of ``control``.
        number: how many collectives this rank has issued.
        history: a hash of all of them in order.
        thread: the thread that issued the latest collective; 0 before the first.
        comparison: the comparison that is under way, if any.
        closed: whether this rank has closed its connections.
    """

    axis: str
    ranks: Sequence[int]
    rank: int
    control: Any = None
    watch: Watch | None = None
    limits: Limits = LIMITS
    groups: Sequence[Any] = ()
    connections: Sequence[socket.socket] = ()
    aborted: Sequence[Any] = ()
    name: str = ""
    number: int = field(default=0, init=False)
    history: int = field(default=0, init=False)
    thread: int = field(default=0, init=False)
    comparison: Comparison | None = field(default=None, init=False)
    closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._not_aborted = list(self.aborted)
        self._process = os.getpid()
        # The latest collectives, each with the positions of the ranks that it needs, if not all.
        self._entries: deque[tuple[Entry, Sequence[int] | None]] = deque(maxlen=KEPT)
        self._sizes = defaultdict[int, set[int]](
            set
        )  # the first ones of each kind of collective
        self._context = (0,) * CONTEXT_LENGTH
        self._agreed_contexts: set[tuple[int, ...]] = set()
        self._warned = False
        # Note: a detector with a name uses the group of another one, which lives longer.
        self._own_group = None if self.name else self.control
        if self.watch is not None:
            self.name = self.name or str(self.control.group_name)
            self.watch.add(self.name, self)

    def __del__(self) -> None:
        # Why only noted: Python collects garbage on any thread and in the middle of torch's code.
        if self.watch is not None and not sys.is_finalizing():
            self.watch.unused.append((self._own_group, self.comparison))

    def record(
        self,
        kind: str,
        label: str,
        dtype: torch.dtype | None = None,
        numel: int = 0,
        *,
        self_checking: bool = False,
        needs: Sequence[int] | None = None,
    ) -> int:
        """Record the collective that this rank is about to issue, and return its number.

        Arguments:
            kind: of collective.
            label: its purpose, for errors.
            dtype, numel: of the whole tensor.
            self_checking: whether the collective's own messages carry ``history``.
            needs: positions of the ranks whose part this rank needs; by default all.

        Raises:
            RuntimeError: the ranks issue different collectives.
        """
        kind_code = self._append((kind, label, dtype, numel), needs)
        if self.control is None or self_checking:
            return self.number
        sizes = self._sizes[kind_code]
        new_size = len(sizes) < MOST_SIZES and numel not in sizes
        if new_size:
            sizes.add(numel)
            if len(self._sizes) > MOST_CONTEXTS:
                # Note: all ranks clear at one collective, so they agree on what is new.
                self._sizes.clear()
        # Note: sizes are no part of a context, so a batch of another length is in a known one.
        context = self._context = (*self._context[1:], kind_code)
        if new_size or (context not in self._agreed_contexts and not self._knows_enough()):
            self._agreed_contexts.add(context)
            self._compare_now(0)
        elif self.number % COMPARE_EVERY == 0:
            self._finish_comparison()
            self.comparison = self._start_comparison(0)
        # Why here too: a desync is named sooner. Ranks may differ in when, as none waits.
        elif self.comparison is not None and has_ended(self.comparison.work):
            self._finish_comparison()
        return self.number

    def all_gather_text(self, text: str, label: str = "") -> list[str]:
        """Return every rank's ``text``, in order of ranks; waits, and compares histories."""
        # Why not dist.all_gather_object: it unpickles, and needs NumPy.
        self._append(("all_gather_text", label, None, 0))
        text_bytes = text.encode()
        text_hash = int.from_bytes(hashlib.sha256(text_bytes).digest()[:8], "big") & MASK
        longest_text, highest, lowest = self._compare_now(
            len(text_bytes), text_hash, -text_hash
        )
        # Note: all hashes are equal, so no text has to be sent.
        if highest == -lowest:
            return [text] * len(self.ranks)
        padded_bytes = text_bytes.ljust(longest_text, _PADDING)
        own_row = torch.tensor([*padded_bytes], dtype=torch.uint8, device="cpu")
        byte_rows = [torch.empty_like(own_row) for _ in self.ranks]
        gather_work = dist.all_gather(byte_rows, own_row, group=self.control, async_op=True)
        self.wait([gather_work], self.number)
        return [bytes(row.tolist()).rstrip(_PADDING).decode() for row in byte_rows]

    def wait(self, works: Sequence[Any], number: int) -> None:
        """Wait for every work of collective ``number``, and raise what ``wait_until`` raises."""
        for work in works:
            self.wait_until(functools.partial(_has_come, work), number)

    def wait_until(self, has_come: Callable[[float], bool], number: int) -> None:
        """Wait for collective ``number``.

        Arguments:
            has_come: waits for so many seconds, and returns whether the collective has ended; it
                raises ``RuntimeError`` if that has failed.
            number: of the collective.

        Raises:
            RuntimeError: the ranks issue different collectives, a rank is given up, or the
                collective failed.
        """
        check_process(self._process, self.ranks[self.rank])
        seconds = self.limits.patience
        while True:
            try:
                if has_come(seconds):
                    return
            except RuntimeError as error:
                self.raise_failure(error, number)
            # Note: a slow rank is no error, so the wait continues unless this raises.
            self.look(number)
            seconds = self.limits.patience / 8

    def look(self, number: int) -> None:
        """Raise ``RuntimeError`` if this rank waits for collective ``number`` in vain."""
        if self.watch is not None and (why := self._why(number)):
            # Why on all axes: this rank raises, and other axes' ranks wait for it in vain.
            self.watch.close_connections()
            raise RuntimeError(why)

    def find_lost(self) -> str:
        """Return an error message if a rank of the axis is given up, or ``""``."""
        return self._why(0)

    def _why(self, number: int, *, failed: bool = False) -> str:
        """Return why this rank waits for collective ``number`` in vain, or why that has failed."""
        if self.watch is None:
            return ""
        needed_ranks, is_recorded = self.ranks, number in self._recorded
        if is_recorded and not failed:
            _, needed_positions = self._entries[number - self.number - 1]
            if needed_positions is not None:
                needed_ranks = [self.ranks[position] for position in needed_positions]
        what = f"{self._describe(number)} (number {number} on mesh axis {self.axis!r})"
        # Why no number otherwise: it is not known which ranks the collective needs.
        shown_number = number * (is_recorded or failed)
        wait = Wait(self.name, shown_number, what, needed_ranks)
        detector = self if shown_number else None
        return self.watch.why(wait, self.limits.give_up, detector, failed=failed)

    def raise_desync(self, number: int, peer: str = "another rank") -> NoReturn:
        """Raise because ``peer`` reached collective ``number`` with another history."""
        # Why so long: ranks show their collectives in a look, first after ``patience``.
        why = self._why_within(self.limits.patience + 1, number)
        self.close_connections()
        raise RuntimeError(
            why
            or f"ranks issue different collectives: {self._title(self.rank)} has reached number "
            f"{number} on mesh axis {self.axis!r}, {self._describe(number)}, after other "
            f"collectives than {peer}; {SAME_ORDER}"
        )

    def _knows_enough(self) -> bool:
        """Return whether the ranks agree on no more contexts, and warn once."""
        if len(self._agreed_contexts) < MOST_CONTEXTS:
            return False
        if not self._warned:
            self._warned = True
            _log.warning(
                "mesh axis %r: the program has issued its collectives in %d orders, and goes on "
                "with new ones; from here on funcshard compares the ranks every %d collectives "
                "only, so it may name a desync later",
                self.axis,
                MOST_CONTEXTS,
                COMPARE_EVERY,
            )
        return True

    def _append(self, entry: Entry, needs: Sequence[int] | None = None) -> int:
        """Record a collective, and return its hash without the size."""
        # Why before a collective: gloo's waits never end in a process without gloo's threads.
        check_process(self._process, self.ranks[self.rank])
        entry_hash, kind_code = _codes_of(entry)
        self.number += 1
        self.thread = get_ident()
        self._entries.append((entry, needs))
        if self.watch is not None:
            self.watch.pulse.latest = self.axis, self.number, entry
        # Note: the factor makes the order count, and 62 bits leave room for the sign of an int64.
        self.history = (self.history * 6364136223846793005 + entry_hash + 1) & MASK
        return kind_code

    def _compare_now(self, *values: int) -> list[int]:
        """Compare histories, wait, and return the maxima of ``values``."""
        self._finish_comparison()
        comparison = self.comparison = self._start_comparison(*values)
        self._finish_comparison()
        return [int(maximum) for maximum in comparison.highest[4:]]

    def _start_comparison(self, *values: int) -> Comparison:
        # Why one fixed size: ranks that disagree on a collective must still be able to compare.
        own_row = [self.number, self.history, -self.number, -self.history]
        compared_numbers = [*own_row, *(*values, 0, 0, 0)[:3]]
        # Note: a maximum over ranks tells whether all are equal, if each number comes with its
        # negative. Its 56 bytes do not grow with the number of ranks.
        highest = torch.tensor(compared_numbers, device="cpu")
        work = dist.all_reduce(
            highest, op=dist.ReduceOp.MAX, group=self.control, async_op=True
        )
        return Comparison(self.number, self.history, highest, work)

    def _finish_comparison(self) -> None:
        """Wait for the last comparison, if any; raise if histories differ."""
        comparison, self.comparison = self.comparison, None
        if comparison is None:
            return
        number, history, highest, work = comparison
        self.wait([work], number)
        # Why on every rank: the maxima are not all those of any single rank.
        if highest[:4].tolist() != [number, history, -number, -history]:
            self.raise_desync(number)

    def _why_within(self, seconds: float, number: int) -> str:
        """Return why collective ``number`` has failed; wait so long until other ranks know it."""
        end_time = time.monotonic() + seconds
        while not (why := self._why(number, failed=True)) and time.monotonic() < end_time:
            time.sleep(min(0.05, max(seconds, 0.0)))
        return why

    def raise_failure(self, error: Exception, number: int) -> NoReturn:
        """Raise ``RuntimeError`` for collective ``number``, which failed with ``error``."""
        if not dist.is_initialized():
            raise RuntimeError(
                f"{self._title(self.rank)} began {self._describe(number)} on mesh axis "
                f"{self.axis!r} after torch.distributed.destroy_process_group(), which ended the "
                "mesh: call init_mesh again, or destroy the groups last. Communication ended with: "
                f"{error}"
            ) from error
        # Why so short: a rank shows the cause before it closes its connections.
        why = self._why_within(min(self.limits.patience, 1.0), number)
        self.close_connections()
        if why:
            raise RuntimeError(f"{why}. Communication ended with: {error}") from error
        ranks_behind = []
        for rank in range(len(self.ranks)):
            last_number = None
            if self.watch is not None:
                last_number = self.watch.issued(self.ranks[rank], self.name)
            if rank != self.rank and (last_number or 0) < number:
                last_seen = (
                    "never seen"
                    if last_number is None
                    else f"last seen at number {last_number}"
                )
                ranks_behind.append(f"{self._title(rank)} ({last_seen})")
        where_text = "all ranks have reached it"
        if ranks_behind:
            behind_text = ", ".join(some_lines(ranks_behind, "more ranks", MOST_READ))
            where_text = f"not known to have reached it: {behind_text}"
        raise RuntimeError(
            f"{self._title(self.rank)} waited for {self._describe(number)}, collective number "
            f"{number} on mesh axis {self.axis!r}, which failed; {where_text}. Communication ended "
            f"with: {error}"
        ) from error

    def titles(self) -> Mapping[str, str]:
        """Return the latest collectives as text, by number."""
        return {str(number): self._describe(number) for number in self._recorded}

    def close_connections(self) -> None:
        """Close this rank's connections, so that ranks that wait for it fail at once."""
        # Why: after a desync no later result would be right, and an open collective would keep this
        # process from leaving its group.
        self.closed = True
        for connection in self.connections:
            with contextlib.suppress(OSError):
                # Why no close: a forked child that holds the socket would keep it open.
                connection.shutdown(socket.SHUT_RDWR)
        # Why: kernels of NCCL that wait for other ranks keep the process until their timeout.
        while self._not_aborted:
            abort_group(self._not_aborted.pop())
        next_rank = (self.rank + 1) % len(self.ranks)
        # Why a receive: gloo has no call that closes a group's connections, but a receive that
        # times out closes all of them.
        for group in self.groups:
            with contextlib.suppress(
                RuntimeError, ValueError
            ):  # timed out, or closed already
                receive_work = dist.irecv(
                    torch.empty(1, dtype=torch.float32, device="cpu"),
                    group=group,
                    group_src=next_rank,
                )
                if receive_work is not None:
                    receive_work.wait(datetime.timedelta(milliseconds=1))

    @property
    def _recorded(self) -> range:
        # The deque drops the oldest entries by itself.
        return range(self.number - len(self._entries) + 1, self.number + 1)

    def _describe(self, number: int) -> str:
        if number not in self._recorded:
            return "a collective that is no longer recorded"
        return title_of(self._entries[number - self.number - 1][0])

    def _title(self, rank: int) -> str:
        return f"rank {self.ranks[rank]}"


@functools.lru_cache(maxsize=MOST_CONTEXTS)
def _codes_of(entry: Entry) -> tuple[int, int]:
    """Return hashes of a collective with and without its size."""
    # Why not hash(): it differs between processes.
    return zlib.crc32(repr(entry).encode()), zlib.crc32(repr(entry[:3]).encode())


def _has_come(work: Any, seconds: float) -> bool:
    """Wait for a work of torch for so long; return whether it has ended."""
    try:
        # Note: after this timeout gloo's collectives go on, unlike its receives.
        work.wait(datetime.timedelta(seconds=seconds))
    except RuntimeError:
        # Any work that has not ended has only timed out.
        if not has_ended(work):
            return False
        work.wait()  # raises if it has failed, and has not ended just now
    return True
