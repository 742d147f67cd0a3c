"""The desync of one axis: which collectives this rank has issued there, and whether the other ranks issued the same.

gloo trusts its callers. Ranks that issue different collectives get wrong numbers where the sizes are equal, wait for each
other where they are not, or end the process. Therefore:

- Through shared memory (`shared.py`) every collective carries a hash of all that its rank has issued, and nothing is read
  that another hash came with. The next two are for everything else.
- A collective that follows what no collective has followed before is *agreed* upon before any data moves: every rank says
  what it is about to issue, on a group of its own. A rank that leaves the beaten track stops there.
- Every few collectives the ranks compare what they have issued so far, without waiting for the answer.
- Whoever waits for long, or fails, writes down its latest collectives in the store and reads the others'.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import sys
import time
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

__all__ = ["DesyncDetector"]

KEPT = 64  # entries


EVERY = 16  # collectives between two comparisons; KEPT holds what lies between the last two


CONTEXT = 8  # collectives in a row that make up what a rank has done before


AGREED = 4096  # contexts to agree upon; a program that has more does always something new, and would always wait


MASK = (1 << 62) - 1


_Entry = tuple[str, str, torch.dtype | None, int]


class DesyncDetector:
    """What one rank has issued on one axis.

    Attributes:
        number: how many collectives it has issued.
        history: a hash of all of them in order, the same on ranks that have issued the same.
        patience: seconds that a wait may take before it asks what the others are doing.
    """

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        rank: int,
        control: Any = None,
        store: Any = None,
        patience: float = 5.0,
        groups: Sequence[Any] = (),
        connections: Sequence[socket.socket] = (),
    ) -> None:
        self.number = 0
        self._axis = axis
        self._ranks = ranks
        self._rank = rank
        self._control = control
        self._store = store
        self._groups = groups
        self._connections = connections
        self.patience = patience
        self._slice = datetime.timedelta(seconds=patience)
        self._entries: deque[_Entry] = deque(maxlen=KEPT)
        self._codes: dict[_Entry, int] = {}
        self.history = 0
        self._context = (0,) * CONTEXT
        self._seen: set[tuple[int, ...]] = set()
        self._comparison: _Comparison | None = None

    def __del__(self) -> None:
        # Leaving a group joins gloo's threads, and one that is still at a comparison then waits for ever for Python's lock,
        # which it needs to let go of the tensors.
        comparison = getattr(self, "_comparison", None)
        if comparison is not None and not sys.is_finalizing():
            with contextlib.suppress(RuntimeError):  # ranks that part now have nobody left to tell
                comparison.work.wait(self._slice)
            time.sleep(0.001)

    def record(self, kind: str, label: str, tensor: torch.Tensor | None = None, *, self_checking: bool = False) -> int:
        """Take note of the collective that comes next, and return its number; raise if the ranks do not agree on it.

        Arguments:
            kind: of collective.
            label: what it is for.
            tensor: what it is about, for its dtype and size.
            self_checking: whether the collective itself tells ranks that do not agree.
        """
        entry = self._enter(kind, label, tensor)
        if self._control is None or self_checking:
            return self.number
        context = self._context = (*self._context[1:], self._codes[entry])
        comparison = self._comparison
        if context not in self._seen and len(self._seen) < AGREED:
            self._seen.add(context)
            self._compare(0)
        elif self.number % EVERY == 0:
            self._settle()
            self._comparison = self._start(0)
        elif comparison is not None and comparison.work.is_completed():
            self._settle()
        return self.number

    def all_gather_text(self, text: str) -> list[str]:
        """Return every rank's ``text``, in order of ranks; waits, and compares."""
        # not dist.all_gather_object, which unpickles, and needs NumPy
        self._enter("all_gather_text", "", None)
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        lengths = self._compare(data.numel())
        longest = max(lengths)
        if not longest:
            return [""] * len(lengths)
        rows = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
        padded = torch.nn.functional.pad(data, (0, longest - data.numel()))
        self.wait([dist.all_gather(rows, padded, group=self._control, async_op=True)], self.number)
        return [bytes(row.tolist()[:length]).decode() for row, length in zip(rows, lengths, strict=True)]

    def wait(self, works: Sequence[Any], number: int) -> None:
        """Wait for the parts of collective ``number``; a slow rank is waited for, one that does something else is not."""
        for work in works:
            patience = self._slice
            while True:
                try:
                    work.wait(patience)
                    break
                except RuntimeError:
                    if work.is_completed():  # it has failed, or ended just now; else it is our patience that has ended
                        try:
                            work.wait()
                            break
                        except RuntimeError as error:
                            self._explain(error, number)
                found = self._look()
                if found:
                    self._end()
                    raise RuntimeError(found)
                patience = self._slice / 8

    def _enter(self, kind: str, label: str, tensor: torch.Tensor | None) -> _Entry:
        entry = (kind, label, None, 0) if tensor is None else (kind, label, tensor.dtype, tensor.numel())
        code = self._codes.get(entry)
        if code is None:
            if len(self._codes) >= AGREED:
                self._codes.clear()
            code = self._codes[entry] = zlib.crc32(repr(entry).encode())  # hash() differs from process to process
        self.number += 1
        self._entries.append(entry)
        self.history = (self.history * 6364136223846793005 + code + 1) & MASK
        return entry

    def _compare(self, value: int) -> list[int]:
        """Wait until all ranks have come here by the same way; return every rank's ``value``."""
        self._settle()
        comparison = self._comparison = self._start(value)
        self._settle()
        return [int(row[2]) for row in comparison.rows]

    def _start(self, value: int) -> _Comparison:
        # of one size whatever it is about: ranks that disagree must be able to say so
        rows = [torch.empty(3, dtype=torch.int64) for _ in self._ranks]
        own = torch.tensor([self.number, self.history, value])
        return _Comparison(self.number, rows, own, dist.all_gather(rows, own, group=self._control, async_op=True))

    def _settle(self) -> None:
        comparison, self._comparison = self._comparison, None
        if comparison is None:
            return
        self.wait([comparison.work], comparison.number)
        rows = [row.tolist()[:2] for row in comparison.rows]
        if any(row != rows[0] for row in rows):
            own = rows[self._rank]
            rank = next(rank for rank, row in enumerate(rows) if row != own or rank == len(rows) - 1)
            self.raise_desync(comparison.number, rank, rows[rank][0])

    def raise_desync(self, number: int, rank: int, latest: int) -> NoReturn:
        """Raise because ``rank``, last heard of at number ``latest``, has come to collective ``number`` by another way."""
        found = self._look_for(self.patience + 1)
        self._end()
        raise RuntimeError(
            found
            or f"ranks issue different collectives: {self._title(self._rank)} has come to number {number} on mesh axis "
            f"{self._axis!r}, {self._name(number)}, by another way than {self._title(rank)}, which is at number {latest}; "
            f"every rank has to issue the same ones in the same order"
        )

    def _look_for(self, seconds: float) -> str:
        end = time.monotonic() + seconds
        while not (found := self._look()) and time.monotonic() < end:
            time.sleep(min(0.05, seconds))
        return found

    def _look(self) -> str:
        """Write down this desync for others to read, read theirs, and say where they differ, ``""`` if nowhere."""
        for rank, (number, entries) in sorted(self._read().items()):
            first, theirs_first = self.number - len(self._entries) + 1, number - len(entries) + 1
            for at in range(max(first, theirs_first), min(self.number, number) + 1):
                mine, theirs = self._name(at), entries[at - theirs_first]
                if mine != theirs:
                    return (
                        f"ranks issue different collectives: number {at} on mesh axis {self._axis!r} is {mine} on "
                        f"{self._title(self._rank)} and {theirs} on {self._title(rank)}; every rank has to issue the same "
                        f"ones in the same order"
                    )
        return ""

    def _read(self) -> dict[int, tuple[int, list[str]]]:
        """Every other rank's number of collectives and latest entries, of those that have written them down."""
        if self._store is None:
            return {}
        first = self.number - len(self._entries) + 1
        names = [self._name(at) for at in range(first, self.number + 1)]
        found = {}
        try:
            self._store.set(str(self._rank), json.dumps([self.number, names]))
            for rank in range(len(self._ranks)):
                if rank != self._rank and self._store.check([str(rank)]):
                    number, entries = json.loads(self._store.get(str(rank)))
                    found[rank] = (number, entries)
        except RuntimeError:  # the store has gone with its process: what has been read is all there is
            return found
        return found

    def _explain(self, error: RuntimeError, number: int) -> None:
        """Raise for a collective that failed."""
        found = self._look_for(min(self.patience, 1.0))
        self._end()
        if found:
            raise RuntimeError(f"{found}. Communication ended with: {error}") from error
        numbers = {rank: number for rank, (number, _) in self._read().items()}
        behind = [
            f"{self._title(rank)} ({f'seen at number {numbers[rank]}' if rank in numbers else 'of which nothing is known'})"
            for rank in range(len(self._ranks))
            if rank != self._rank and numbers.get(rank, 0) < number
        ]
        where = f"not known to have come there: {', '.join(behind)}" if behind else "all ranks have come there"
        raise RuntimeError(
            f"{self._title(self._rank)} waited for {self._name(number)}, collective number {number} on mesh axis "
            f"{self._axis!r}, which failed; {where}. Communication ended with: {error}"
        ) from error

    def _end(self) -> None:
        """End what is under way: nothing after this would be right, and who waits for us must not wait longer.

        On gloo there is no other way: a receive that is given up closes the connections of its group. Without it a process
        could not even leave its group, because that waits for collectives that never end.
        """
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        neighbour = (self._rank + 1) % len(self._ranks)
        for group in self._groups:
            with contextlib.suppress(RuntimeError):  # what it is to raise, or that they are closed already
                receive = dist.irecv(torch.empty(1), group=group, group_src=neighbour)
                if receive is not None:
                    receive.wait(datetime.timedelta(milliseconds=1))

    def _name(self, number: int) -> str:
        at = number - (self.number - len(self._entries)) - 1
        if not 0 <= at < len(self._entries):
            return "one that is no longer written down"
        kind, label, dtype, numel = self._entries[at]
        what = kind if dtype is None else f"{kind} of {str(dtype).removeprefix('torch.')}[{numel}]"
        return f"{what} of {label}" if label else what

    def _title(self, rank: int) -> str:
        return f"rank {self._ranks[rank]}"


class _Comparison:
    __slots__ = ("number", "own", "rows", "work")

    def __init__(self, number: int, rows: list[torch.Tensor], own: torch.Tensor, work: Any) -> None:
        self.number, self.rows, self.own, self.work = number, rows, own, work
