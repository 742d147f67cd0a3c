"""Collectives between the ranks of one machine, through shared memory.

A rank writes what it contributes into a piece of shared memory of its own and sends every other rank a message
(`messages.py`); whoever waits or comes by reads the others' pieces once their messages are there. Each byte is written by
the rank that has it, and read where it is needed. A message says

- the collective's number and what its sender has issued up to it: ranks that part see that before they read;
- the piece and where in it, with its file where it is new;
- what its sender has done with, so that the others may use their pieces again.

Of gradients a rank writes into a piece what the others add up, and its own slice where that sum will be. What is gathered
only to be read (``all_gather_shared``) is in memory once for all ranks: each writes its part into one piece of the first rank's. The
socket that messages come through ends with its process, so nobody waits for a rank that is gone.
"""

from __future__ import annotations

import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch

from funcshard._utils import recording_or_transforming
from funcshard.comm import DesyncDetector, Work, concatenate, slice_parts, sum_in_rank_order
from funcshard.comm.shm.pool import LEAST, Lender, Piece, watched
from funcshard.comm.shm.transport import IN_PLACE, Message, Peer, Peers, close

__all__ = ["Shared"]

# Bytes up to which, and ranks up to which, every rank adds up a whole tensor; else it adds up a part and reads the others.
_SMALL, _FEW = 1 << 16, 2


class Shared:
    """What one rank has for its collectives on one group.

    Arguments:
        rank: this process's rank.
        connections: a socket to every other rank, as ``neighbours.connect`` gives them; they are closed with it.
        desync: of the group.
        timeout: seconds after which a collective that a rank did not join is an error.
    """

    def __init__(self, rank: int, connections: Mapping[int, socket.socket], desync: DesyncDetector, timeout: float) -> None:
        self._rank = rank
        self._size = len(connections) + 1
        self._peers = Peers(connections, timeout)
        self._desync = desync
        self._timeout = timeout
        self._memory = Lender()
        self._own: dict[int, tuple[Piece, int]] = {}  # what has been written, and where, by key
        self._under_way: dict[int, int] = {}  # history, by number
        self._latest = 0
        self._reductions: list[weakref.ref[_Reading]] = []
        self._dropped: list[int] = []  # those that nobody waited for; other threads may add to it
        self._common: dict[int, int] = {}  # tensors here of what is in memory once, by number of the collective
        self._left: list[int] = []  # these numbers, once for each such tensor that is gone; other threads may add to it
        self._done: list[int] = []  # what the others do not know to be done with here; see _count
        self._readers: dict[int, int] = {}  # how many ranks have done with it
        weakref.finalize(self, close, connections)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, number: int) -> Work:
        """See ``Group``; ``number`` is the collective's in the desync, here and below."""
        key = self._put(number, 0, shard)

        def read() -> None:
            for part, theirs in zip(out.view(self._size, -1), self._parts(key, shard.numel(), out.dtype), strict=True):
                part.copy_(theirs)

        return _Reading(self, key, read)

    def all_gather_shared(self, shard: torch.Tensor, number: int) -> _Whole:
        """See ``Group``."""
        key, shard = self._come_to(number), shard.detach()
        self._common[number] = 0
        if not self._rank:
            self._own[-number] = (self._memory.take_soon(shard.nbytes * self._size, self._left_to_others, self._receive), 0)
        place = self._place(key)
        if place is None:  # whoever waits puts it there
            self._tell(key, shard, self._memory.take(shard.nbytes))
        else:
            place[self._rank * shard.nbytes :][: shard.nbytes].view(shard.dtype).copy_(shard.reshape(-1))
            self._say(key, IN_PLACE, None if self._rank else self._own[-number][0])
        return _Whole(self, number, shard.numel(), shard.dtype)

    def reduce_scatter(self, out: torch.Tensor, parts: Sequence[torch.Tensor], number: int) -> Work:
        """See ``Group``."""
        key, own, rank = self._come_to(number), out.view(-1), self._rank
        n, others = own.numel(), own.numel() * (self._size - 1)
        piece, at = self._memory.room(others * own.itemsize)
        written = piece.tensor(others, own.dtype, at=at)
        # this rank's slice where its sum will be, the others' in the order of ranks
        for place, begin in ((written[: rank * n], 0), (own, rank * n), (written[rank * n :], (rank + 1) * n)):
            if len(place):
                concatenate(slice_parts(parts, begin, begin + len(place)), place)
        self._own[key] = (piece, at)
        self._say(key, at, piece)

        def read() -> None:
            found = [self._part(key, r, (rank + (r > rank)) * n, own.dtype)[-n:] for r in range(self._size) if r != rank]
            found.insert(rank, own.clone() if rank > 1 else own)  # one of the first two may be where the sum is put
            sum_in_rank_order(own, found)

        reading = _Reading(self, key, read, once=True)
        if not out.is_inference():  # into which nobody may write outside that mode
            self._reductions.append(weakref.ref(reading))
        return reading

    def all_reduce(self, tensor: torch.Tensor, number: int) -> Work:
        """See ``Group``."""
        flat = tensor.view(-1)
        key = self._put(number, 0, flat)
        if self._size <= _FEW or flat.numel() * flat.element_size() <= _SMALL:
            return _Reading(self, key, lambda: sum_in_rank_order(flat, self._parts(key, flat.numel(), flat.dtype)))

        parts = flat.tensor_split(self._size)  # sizes may differ by one
        mine = parts[self._rank]
        begin = sum(map(torch.Tensor.numel, parts[: self._rank]))

        def read_and_tell() -> None:
            sum_in_rank_order(mine, [theirs[begin:] for theirs in self._parts(key, begin + mine.numel(), flat.dtype)])
            then = 2 * number + 1
            if then not in self._own:  # else somebody waits again, after an interruption
                self._put(number, 1, mine)
            _Arrival(self, then).wait_for(self._desync)
            for rank, part in enumerate(parts):
                if rank != self._rank:
                    part.copy_(self._part(then, rank, part.numel(), flat.dtype))

        return _Reading(self, key, read_and_tell)

    def broadcast(self, tensor: torch.Tensor, src: int, number: int) -> Work:
        """See ``Group``."""
        if src == self._rank:
            return _Reading(self, self._put(number, 0, tensor), lambda: None)
        key = self._come_to(number)
        self._say(key)
        return _Reading(self, key, lambda: tensor.view(-1).copy_(self._part(key, src, tensor.numel(), tensor.dtype)))

    def _come_to(self, number: int) -> int:
        """Begin a collective, or its second phase, with all that the others have said by now; return its first key."""
        self._under_way.setdefault(number, self._desync.history)
        self._latest = max(self._latest, number)
        self._listen()
        return 2 * number

    def _put(self, number: int, phase: int, data: torch.Tensor) -> int:
        """Write what this rank contributes, and tell the others; return its key."""
        key = self._come_to(number) + phase
        self._tell(key, data, *self._memory.room(data.nbytes))
        return key

    def _tell(self, key: int, data: torch.Tensor, piece: Piece, at: int = 0) -> None:
        """Write what this rank contributes into a piece, and tell the others."""
        piece.tensor(data.numel(), data.dtype, at=at).copy_(data.reshape(-1))
        self._own[key] = (piece, at)
        self._say(key, at, piece)

    def _left_to_others(self) -> list[Piece]:
        """Pieces with what has been gathered that only others need any more."""
        return [piece for key, (piece, _) in self._own.items() if key < 0 and -key not in self._common]

    def _say(self, key: int = 0, at: int = 0, piece: Piece | None = None) -> None:
        """Send the others a message: where to find what, if anything, and what is done with and gone."""
        which, file = (0, None) if piece is None else (piece.number, piece.file)
        replaced = self._memory.replaced.pop() if self._memory.replaced else 0
        done = [self._done.pop(0) if self._done else 0 for _ in range(2)]
        message = Message(key, self._under_way.get(key >> 1, 0), which, at, replaced, *done)
        self._peers.send(message, file, self._receive)
        if piece is not None:
            piece.close()

    def _listen(self) -> None:
        """Take all that the others have said; let go of what nobody waits for or needs any more."""
        while self._receive(0.0):
            pass
        self._reductions = [reading for reading in self._reductions if _under_way(reading)]
        while self._dropped:
            self._forget(self._dropped.pop())
        while self._left:
            number = self._left.pop()
            self._common[number] -= 1
            self._leave(number)

    def _receive(self, seconds: float) -> bool:
        """Take a message of each of the others, waiting at most so long for the first; return whether there was any."""
        any_came = False
        for peer, message in self._peers.receive(seconds):
            any_came = True
            if message is None:
                continue
            number = message.key >> 1
            if number > self._latest or number in self._under_way:  # else it has been given up
                peer.said[message.key] = message
            peer.latest = max(peer.latest, number)
            for each in filter(None, (message.done, message.done_too)):
                self._count(each)
        return any_came

    def _here(self, key: int) -> bool:
        """Whether every rank has said what there is under a key, or gone on without it; raise if one has ended."""
        here = True
        for peer in self._peers.all:
            # a second message of one number comes when its sender waits, perhaps after the first of the next
            if key in peer.said or (not key & 1 and peer.latest > key >> 1):
                continue
            if not peer.open:
                raise RuntimeError(f"Connection closed by rank {peer.rank} of the group")
            here = False
        return here

    def _apart(self, key: int) -> Peer | None:
        """A rank that has not come to a key as this one has, or not yet."""
        history = self._under_way[key >> 1]
        different = (peer for peer in self._peers.all if key not in peer.said or peer.said[key].history != history)
        return next(different, None)

    def _place(self, key: int) -> torch.Tensor | None:
        """Where a gathering is put together, ``[bytes]``; ``None`` if rank 0 has not said it, or does something else."""
        if not self._rank:
            piece, _ = self._own[-(key >> 1)]
            return piece.tensor(len(piece.memory), torch.uint8)
        first = self._peers.all[0]
        said = first.said.get(key)
        if said is None or said.at != IN_PLACE or said.history != self._under_way[key >> 1]:
            return None
        return first.pieces[said.piece]

    def _whole(self, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """What has been gathered in memory that all have in common, with what its ranks could not put there."""
        key, left = 2 * number, self._left
        place = self._place(key)
        if place is None:
            self._desync.raise_desync(number, 0, self._peers.all[0].latest)
        self._common[number] += 1
        whole = watched(place, self._size * numel, dtype, lambda _: left.append(number))
        rows = whole.view(self._size, -1)
        if key in self._own:  # left aside before rank 0 came; who is slower need not put it there any more
            rows[self._rank].copy_(self._part(key, self._rank, numel, dtype))
            self._say(key, IN_PLACE, self._own[key][0])
        while any(peer.said[key].at != IN_PLACE for peer in self._peers.all) and self._receive(0.0):
            pass  # by now they may have
        for peer in self._peers.all:
            if peer.said[key].at != IN_PLACE:
                rows[peer.rank].copy_(self._part(key, peer.rank, numel, dtype))  # several may do so, with the same bytes
        # in inference mode nobody would notice that it is written to
        return whole.clone() if torch.is_inference_mode_enabled() else whole

    def _part(self, key: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first elements of what a rank wrote."""
        if rank == self._rank:
            piece, at = self._own[key]
            return piece.tensor(numel, dtype, at=at)
        peer = self._peers.all[rank - (rank > self._rank)]
        said = peer.said[key]
        if said.at == IN_PLACE:  # where it is not where it could be: it is about something else
            self._desync.raise_desync(key >> 1, rank, peer.latest)
        return peer.pieces[said.piece][said.at : said.at + numel * dtype.itemsize].view(dtype)

    def _parts(self, key: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The first elements of what each rank wrote, in order of ranks."""
        return [self._part(key, rank, numel, dtype) for rank in range(self._size)]

    def _forget(self, number: int) -> None:
        """Be done with a collective: read, or given up."""
        if self._under_way.pop(number, None) is not None:
            keys = (2 * number, 2 * number + 1)
            said = {peer.rank: peer.said.pop(key) for peer in self._peers.all for key in keys if key in peer.said}
            large = any(len(self._own[key][0].memory) > LEAST for key in keys if key in self._own)
            if number in self._common:
                large = any(message.piece for rank, message in said.items() if rank)  # left aside, now or before
            self._done.append(number)
            self._count(number)
            while large and self._done:  # pieces are wanted back at once; of others the next collective tells
                self._say()
        self._leave(number)

    def _leave(self, number: int) -> None:
        """Be done with what is in memory once, when nobody here needs it any more."""
        if number not in self._under_way and self._common.get(number) == 0:
            del self._common[number]
            self._done += [-number] * (self._rank > 0)
            self._count(-number)

    def _count(self, done: int) -> None:
        """Take note that one more rank has done with something, the last of which frees its memory.

        A number is that of a collective, for which everybody's contributions have been read; the negative of one is what
        that has put together in the first rank's memory.
        """
        if done < 0 and self._rank:
            return
        readers = self._readers[done] = self._readers.get(done, 0) + 1
        if readers < self._size:
            return
        del self._readers[done]
        for key in (2 * done, 2 * done + 1) if done > 0 else (done,):
            if key in self._own:
                self._memory.release(self._own.pop(key)[0])


class _Arrival:
    """The others' messages under one key, as ``DesyncDetector.wait`` takes it."""

    __slots__ = ("_end", "_key", "_shared")

    def __init__(self, shared: Shared, key: int) -> None:
        self._shared, self._key = shared, key
        self._end = time.monotonic() + shared._timeout

    def wait(self, patience: timedelta | None = None) -> None:
        """Return once they are there; raise when patience or the group's time ends, or the rank that is missing."""
        end = self._end if patience is None else min(self._end, time.monotonic() + patience.total_seconds())
        while not self._shared._here(self._key):
            left = end - time.monotonic()
            # time may have passed elsewhere, so what has come by now counts
            if not self._shared._receive(max(left, 0.0)) and left <= 0:
                raise RuntimeError(f"Timed out waiting {self._shared._timeout:g} s for the ranks of one machine")

    def is_completed(self) -> bool:
        """Whether waiting longer changes nothing."""
        try:
            return time.monotonic() >= self._end or self._shared._here(self._key)
        except RuntimeError:
            return True

    def wait_for(self, desync: DesyncDetector) -> None:
        """Wait, and raise on ranks that do something else."""
        desync.wait([self], self._key >> 1)
        peer = self._shared._apart(self._key)
        if peer is not None:
            desync.raise_desync(self._key >> 1, peer.rank, peer.latest)


class _Reading:
    """A collective under way: what the others contribute is read when somebody waits."""

    __slots__ = ("__weakref__", "_arrival", "_broken", "_key", "_once", "_read", "_shared")

    def __init__(self, shared: Shared, key: int, read: Callable[[], object], *, once: bool = False) -> None:
        self._shared, self._key, self._once = shared, key, once
        self._read: Callable[[], object] | None = read
        self._arrival = _Arrival(shared, key)
        self._broken = False

    def wait(self) -> None:
        if self._read is not None:
            self._arrival.wait_for(self._shared._desync)
            self._end(self._read)

    def _end(self, read: Callable[[], object]) -> None:
        if self._broken:
            raise RuntimeError("a reduce-scatter was interrupted while it added up, and cannot be waited for again")
        try:
            read()
            self._read = None
        except BaseException:
            self._broken = self._once  # what has been added would be added once more
            raise
        self._shared._forget(self._key >> 1)

    def end_if_here(self) -> bool:
        """Read now if all is here, so that the others have their memory back; return whether there is no more to do."""
        if self._read is not None and not self._broken and self._shared._apart(self._key) is None:
            self._end(self._read)
        return self._read is None

    def __del__(self) -> None:
        if self._read is not None:
            self._shared._dropped.append(self._key >> 1)


class _Whole:
    """A gathering under way into memory that all ranks have in common."""

    __slots__ = ("_out", "_reading")

    def __init__(self, shared: Shared, number: int, numel: int, dtype: torch.dtype) -> None:
        out: list[torch.Tensor] = []
        self._out = out
        self._reading = _Reading(shared, 2 * number, lambda: out.append(shared._whole(number, numel, dtype)))

    def wait(self) -> torch.Tensor:
        self._reading.wait()
        return self._out[-1]


def _under_way(reading: weakref.ref[_Reading]) -> bool:
    """Whether somebody may still wait for it; if it can end now, it does."""
    found = reading()
    if torch.is_inference_mode_enabled() or recording_or_transforming():  # its sum is no part of what runs there
        return found is not None
    return found is not None and not found.end_if_here()
