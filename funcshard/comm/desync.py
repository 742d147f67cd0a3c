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
- Diagnosis. A rank that waits for long, or whose collective fails, writes its latest collectives to
  the process group's store, reads those of other ranks, and names the first difference. It also
  asks the ``journal``, which looks at all axes together.

On ranks of equal programs the same contexts are new, and all of them appear in the first two steps,
so later steps do not wait.

One desync is not found. On gloo, two ranks that differ in known contexts, with messages of
different size, reach gloo before the next comparison. gloo then ends one process, and the remaining
ranks say in which collective they waited.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import logging
import os
import socket
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from funcshard._utils.torch_groups import abort_group, has_ended
from funcshard.comm.journal import Comparison, Journal, Unused, Wait, compact
from funcshard.comm.liveness import LIMITS, MOST_READ, Heart, Limits, check_process, read, some_of
from funcshard.comm.native import gather_single

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

# Kind, label, dtype and number of elements of a collective.
_Entry = tuple[str, str, torch.dtype | None, int]


@dataclass(eq=False, repr=False)
class DesyncDetector:
    """The collectives that one rank has issued on one mesh axis, with checks against other ranks.

    Attributes:
        axis: name of the mesh axis, for errors.
        ranks: global rank of each rank of the axis, for errors.
        rank: position of this rank in ``ranks``.
        control: the gloo process group for comparisons, if any.
        store: the store for the latest collectives of each rank, whose calls do not wait for long;
            ``None`` for no diagnosis.
        limits: how long a wait may take before this rank looks at the others.
        groups: gloo groups whose connections this rank closes before it raises.
        connections: sockets that it closes.
        aborted: groups of other backends that it aborts.
        journal: the waits of this rank over all axes, if any.
        heart: the signs of life of this process, if any.
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
    store: Any = None
    limits: Limits = LIMITS
    groups: Sequence[Any] = ()
    connections: Sequence[socket.socket] = ()
    aborted: Sequence[Any] = ()
    journal: Journal | None = None
    heart: Heart | None = None
    number: int = field(default=0, init=False)
    history: int = field(default=0, init=False)
    thread: int = field(default=0, init=False)
    comparison: Comparison | None = field(default=None, init=False)
    closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.ranks = compact(self.ranks)
        self._not_aborted = list(self.aborted)
        self._process = os.getpid()
        self._timeout = datetime.timedelta(seconds=self.limits.patience)
        self._entries: deque[_Entry] = deque(maxlen=KEPT)
        self._codes: dict[_Entry, tuple[int, int]] = {}  # hashes with and without the size
        # How many sizes a collective has had, by the second hash.
        self._sizes: Counter[int] = Counter()
        self._context = (0,) * CONTEXT_LENGTH
        self._agreed_contexts: set[tuple[int, ...]] = set()
        # The ranks that a collective needs, if not all.
        self._partial: dict[int, Sequence[int]] = {}
        self._looks, self._warned = 0, False
        self._group = "" if self.control is None else str(self.control.group_name)
        if self.journal is not None:
            self.journal.add(self._group, self)
        if self.heart is not None:
            self.heart.watch(self, self.limits.give_up)

    def __del__(self) -> None:
        # Why only noted: Python collects garbage on any thread and in the middle of torch's code.
        if self.journal is not None and not sys.is_finalizing():
            self.journal.unused.append(Unused(self.control, self.comparison, self.store, self.rank))

    def record(
        self,
        kind: str,
        label: str,
        tensor: torch.Tensor | None = None,
        *,
        self_checking: bool = False,
        needs: Sequence[int] | None = None,
    ) -> int:
        """Record the collective that this rank is about to issue, and return its number.

        Arguments:
            kind: of collective.
            label: its purpose, for errors.
            tensor: gives the dtype and the number of elements to record.
            self_checking: whether the collective's own messages carry ``history``.
            needs: positions of the ranks whose part this rank needs; by default all.

        Raises:
            RuntimeError: the ranks issue different collectives.
        """
        kind_code, new_size = self._append(kind, label, tensor)
        if needs is not None:
            self._partial[self.number] = needs
            if len(self._partial) > KEPT:
                del self._partial[next(iter(self._partial))]
        if self.control is None or self_checking:
            return self.number
        # Note: sizes are no part of a context, so a batch of another length is in a known one.
        context = self._context = (*self._context[1:], kind_code)
        if new_size or (context not in self._agreed_contexts and not self._knows_enough()):
            self._agreed_contexts.add(context)
            self._compare_now(0)
        elif self.number % COMPARE_EVERY == 0:
            self._finish_comparison()
            self.comparison = self._start_comparison(0)
        elif self.comparison is not None and has_ended(self.comparison.work):
            self._finish_comparison()
        return self.number

    def all_gather_text(self, text: str, label: str = "") -> list[str]:
        """Return every rank's ``text``, in order of ranks; waits, and compares histories."""
        # Why not dist.all_gather_object: it unpickles, and needs NumPy.
        self._append("all_gather_text", label, None)
        text_bytes = text.encode()
        text_hash = int.from_bytes(hashlib.sha256(text_bytes).digest()[:8], "big") & MASK
        longest_text, highest, lowest = self._compare_now(len(text_bytes), text_hash, -text_hash)
        # Note: all hashes are equal, so no text has to be sent.
        if highest == -lowest:
            return [text] * len(self.ranks)
        padded_bytes = text_bytes.ljust(longest_text, _PADDING)
        byte_rows = self._gather(torch.tensor([*padded_bytes], dtype=torch.uint8, device="cpu"))
        return [bytes(byte_row).rstrip(_PADDING).decode() for byte_row in byte_rows.tolist()]

    def wait(self, works: Sequence[Any], number: int) -> None:
        """Wait for every work of collective ``number``.

        Raises:
            RuntimeError: the ranks issue different collectives, a rank is given up, or the
                collective failed.
        """
        check_process(self._process, self.ranks[self.rank])
        serial = None
        for work in works:
            wait_timeout = self._timeout
            while True:
                try:
                    work.wait(wait_timeout)
                    break
                except RuntimeError:
                    # a completed work has failed, or ended just now; any other has only timed out
                    if has_ended(work):
                        try:
                            work.wait()
                            break
                        except RuntimeError as error:
                            self.raise_failure(error, number)
                # Only a wait that takes long gets a number, so short ones cost nothing.
                if serial is None and self.journal is not None:
                    serial = self.journal.begin_wait()
                # Note: a slow rank is no error, so the wait continues unless this raises.
                self.look(number, serial)
                wait_timeout = self._timeout / 8

    def look(self, number: int, serial: int | None = None) -> None:
        """Raise ``RuntimeError`` if this rank waits for collective ``number`` in vain."""
        # Why first: ranks that differ soon wait for each other too; the difference is the cause.
        if difference := self._find_difference():
            self.close_connections()
            raise RuntimeError(difference)
        lost_text = self._find_circle(number, serial) or self._find_lost(self._needed(number))
        if lost_text:
            if self.journal is not None:
                self.journal.close_connections()
            self.close_connections()
            raise RuntimeError(lost_text)

    def latest(self) -> str:
        """Return the latest collective as text."""
        number = self.number
        return f"{self._describe(number)}, collective number {number} on mesh axis {self.axis!r}"

    def raise_desync(self, number: int, rank: int, latest: int) -> NoReturn:
        """Raise because ``rank`` reached collective ``number`` with another history than this rank.

        ``latest`` is the latest collective that the other rank is known to have issued.
        """
        difference = self._find_difference_within(self.limits.patience + 1)
        self.close_connections()
        raise RuntimeError(
            difference
            or f"ranks issue different collectives: {self._title(self.rank)} has reached number "
            f"{number} on mesh axis {self.axis!r}, {self._describe(number)}, after other "
            "collectives than "
            f"{self._title(rank)}, which is at number {latest}; every rank has to issue the same "
            "ones in the same order"
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

    def _append(self, kind: str, label: str, tensor: torch.Tensor | None) -> tuple[int, bool]:
        """Record a collective; return its hash without the size, and whether the size is new."""
        # Why before a collective: gloo's waits never end in a process without gloo's threads.
        check_process(self._process, self.ranks[self.rank])
        entry = (
            (kind, label, None, 0)
            if tensor is None
            else (kind, label, tensor.dtype, tensor.numel())
        )
        entry_hashes, new_size = self._codes.get(entry), False
        if entry_hashes is None:
            if len(self._codes) >= MOST_CONTEXTS:
                self._codes.clear()
                if len(self._sizes) >= MOST_CONTEXTS:
                    self._sizes.clear()
            # Why not hash(): it differs between processes.
            entry_hashes = self._codes[entry] = (
                zlib.crc32(repr(entry).encode()),
                zlib.crc32(repr(entry[:3]).encode()),
            )
            self._sizes[entry_hashes[1]] += 1
            new_size = self._sizes[entry_hashes[1]] <= MOST_SIZES
        entry_hash, kind_code = entry_hashes
        self.number += 1
        self.thread = get_ident()
        self._entries.append(entry)
        # Note: the factor makes the order count, and 62 bits leave room for the sign of an int64.
        self.history = (self.history * 6364136223846793005 + entry_hash + 1) & MASK
        return kind_code, new_size

    def _compare_now(self, *values: int) -> list[int]:
        """Compare histories, wait, and return the maxima of ``values``."""
        self._finish_comparison()
        comparison = self.comparison = self._start_comparison(*values)
        self._finish_comparison()
        return [int(maximum) for maximum in comparison.highest[4:]]

    def _start_comparison(self, *values: int) -> Comparison:
        own = self.number, self.history
        # Why one fixed size: ranks that disagree on a collective must still be able to compare.
        compared_numbers = [*own, -self.number, -self.history, *(*values, 0, 0, 0)[:3]]
        # Note: a maximum over ranks tells whether all are equal, if each number comes with its
        # negative. Its 56 bytes do not grow with the number of ranks.
        highest = torch.tensor(compared_numbers, device="cpu")
        work = dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.control, async_op=True)
        return Comparison(own, highest, work)

    def _finish_comparison(self) -> None:
        """Wait for the last comparison, if any; raise if histories differ."""
        comparison, self.comparison = self.comparison, None
        if comparison is None:
            return
        number, history = comparison.own
        self.wait([comparison.work], number)
        if comparison.highest[:4].tolist() == [number, history, -number, -history]:
            return
        # Every rank comes here, because the maxima are not all those of any single rank.
        # Note: this is a collective of all ranks again, and names one of those that differ.
        own_row = [number, history]
        rank_rows = self._gather(torch.tensor(own_row, device="cpu")).tolist()
        last_rank = len(rank_rows) - 1
        rank = next(
            rank
            for rank, rank_row in enumerate(rank_rows)
            if rank_row != own_row or rank == last_rank
        )
        self.raise_desync(number, rank, rank_rows[rank][0])

    def _gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks."""
        gathered_rows = own.new_empty(len(self.ranks) * len(own))
        self.wait(
            [gather_single(gathered_rows, own, group=self.control, async_op=True)], self.number
        )
        return gathered_rows.view(-1, len(own))

    def _find_difference_within(self, seconds: float) -> str:
        end_time = time.monotonic() + seconds
        while not (difference := self._find_difference()) and time.monotonic() < end_time:
            time.sleep(min(0.05, seconds))
        return difference

    def _find_difference(self) -> str:
        """Return an error message about the first difference between ranks, or ``""``."""
        for other_rank, (last_number, other_titles) in sorted(self._exchange_entries().items()):
            for number, other_title in enumerate(other_titles, last_number - len(other_titles) + 1):
                own_title = self._describe(number)
                if number in self._recorded and other_title != own_title:
                    return (
                        f"ranks issue different collectives: number {number} on mesh axis "
                        f"{self.axis!r} is {own_title} on {self._title(self.rank)} and "
                        f"{other_title} on {self._title(other_rank)}; every rank has to issue the "
                        "same ones in the same order"
                    )
        return ""

    def _exchange_entries(self) -> dict[int, tuple[int, list[str]]]:
        """Write this rank's latest collectives to the store, and return those of others."""
        entries_by_rank: dict[int, tuple[int, list[str]]] = {}
        if self.store is None:
            return entries_by_rank
        size = len(self.ranks)
        distances = [1 << power for power in range(size.bit_length() - 1)]
        # Why these first, of many: the ranks on both sides of a difference read each other.
        near_ranks = [(self.rank + sign * away) % size for away in distances for sign in (1, -1)]
        self._looks += 1
        # Why suppressed: the store is silent, its process has ended, or a text is cut short.
        with contextlib.suppress(RuntimeError, ValueError):
            own_titles = [self._describe(number) for number in self._recorded]
            self.store.set(str(self.rank), json.dumps([self.number, own_titles]))
            for rank in some_of(range(size), self._looks, near_ranks):
                rank_text = read(self.store, rank) if rank != self.rank else b""
                if rank_text:
                    entries_by_rank[rank] = json.loads(rank_text)
        return entries_by_rank

    def raise_failure(self, error: Exception, number: int) -> NoReturn:
        """Raise ``RuntimeError`` for collective ``number``, which failed with ``error``."""
        check_process(self._process, self.ranks[self.rank])
        if not dist.is_initialized():
            raise RuntimeError(
                f"{self._title(self.rank)} began {self._describe(number)} on mesh axis "
                f"{self.axis!r} after torch.distributed.destroy_process_group(), which ended the "
                "mesh: call init_mesh anew, or destroy the groups last. Communication ended with: "
                f"{error}"
            ) from error
        # Why in this order: what another rank has found out is the cause, and what this one finds
        # may be a consequence of it.
        difference = (
            self._find_lost([])
            or self._find_difference_within(min(self.limits.patience, 1.0))
            or self._find_circle(number, None, failed=True)
            or self.find_lost()
        )
        self.close_connections()
        if difference:
            raise RuntimeError(f"{difference}. Communication ended with: {error}") from error
        last_numbers = {
            rank: last_number for rank, (last_number, _) in self._exchange_entries().items()
        }
        ranks_behind = []
        for rank in range(len(self.ranks)):
            if rank != self.rank and last_numbers.get(rank, 0) < number:
                last_seen = (
                    f"last seen at number {last_numbers[rank]}"
                    if rank in last_numbers
                    else "never seen"
                )
                ranks_behind.append(f"{self._title(rank)} ({last_seen})")
        if len(ranks_behind) > MOST_READ:
            ranks_behind[MOST_READ:] = [f"and {len(ranks_behind) - MOST_READ} more ranks"]
        where_text = "all ranks have reached it"
        if ranks_behind:
            where_text = f"not known to have reached it: {', '.join(ranks_behind)}"
        raise RuntimeError(
            f"{self._title(self.rank)} waited for {self._describe(number)}, collective number "
            f"{number} on mesh axis {self.axis!r}, which failed; {where_text}. Communication ended "
            f"with: {error}"
        ) from error

    def _find_circle(self, number: int, serial: int | None, *, failed: bool = False) -> str:
        """Return an error message if ranks wait for each other on several axes, or ``""``."""
        is_forgotten = number <= self.number - KEPT
        if self.journal is None or (serial is None and not failed) or is_forgotten:
            return ""
        needed_ranks = self._needed(number)
        waited_for = f"{self._describe(number)} (number {number} on mesh axis {self.axis!r})"
        return self.journal.find_circle(
            Wait(self._group, number, waited_for, needed_ranks, serial or 0), failed=failed
        )

    def _needed(self, number: int) -> Sequence[int]:
        """Return the global ranks without which collective ``number`` cannot end here."""
        needed_positions = self._partial.get(number)
        return (
            self.ranks
            if needed_positions is None
            else [self.ranks[peer_rank] for peer_rank in needed_positions if peer_rank != self.rank]
        )

    def find_lost(self) -> str:
        """Return an error message if a rank of the axis is given up, or ``""``."""
        return self._find_lost(self.ranks)

    def _find_lost(self, ranks: Sequence[int]) -> str:
        return "" if self.heart is None else self.heart.find_lost(ranks, self.limits.give_up)

    def close_connections(self) -> None:
        """Close this rank's connections, so that ranks that wait for it fail at once."""
        # Why: after a desync no later result would be right, and an open collective would keep this
        # process from leaving its group.
        self.closed = True
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        # Why: kernels of NCCL that wait for other ranks keep the process until their timeout.
        while self._not_aborted:
            abort_group(self._not_aborted.pop())
        next_rank = (self.rank + 1) % len(self.ranks)
        # Why a receive: gloo has no call that closes a group's connections, but a receive that
        # times out closes all of them.
        for group in self.groups:
            with contextlib.suppress(RuntimeError, ValueError):  # timed out, or closed already
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
        title, label, dtype, numel = self._entries[number - self.number - 1]
        if dtype is not None:
            title += f" of {str(dtype).removeprefix('torch.')}[{numel}]"
        return f"{title} of {label}" if label else title

    def _title(self, rank: int) -> str:
        return f"rank {self.ranks[rank]}"
