"""Collectives between the ranks of one machine, through shared memory.

A rank writes what it contributes into a piece of shared memory of its own and sends every other rank a message of a few
numbers; whoever waits reads the others' pieces once their messages are there. Each byte is written once by the rank that has
it, and read where it is needed. A message says

- the collective's number and what its sender has issued up to it: ranks that part see that before they read;
- the piece and where in it, with its file where it is new;
- which collectives its sender has done with, so that the others may use their pieces again.

Gradients may be put together in such a piece from the start (``empty``), and are not copied again. The socket that messages
come through ends with its process, so nobody waits for a rank that is gone.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch

from funcshard.group import Work, add_in_order
from funcshard.journal import Journal
from funcshard.memory import Piece, Pool, mapped, shared
from funcshard.neighbours import close

__all__ = ["Shared"]

# key (0: no collective), history, piece and where in it, whether its file comes along, what it replaces, two that are done
# with; 0 for none
_MESSAGE = struct.Struct("<8q")

# Bytes up to which, and ranks up to which, every rank adds up a whole tensor; else it adds up a part and reads the others.
_SMALL, _FEW = 1 << 16, 2

# Bytes of a piece that tiny contributions share, and pieces that are lent at a time: each has an open file.
_LEAST, _MOST = 1 << 16, 64

# Bytes up to which contributions lie side by side in a piece of _LEAST, each from a multiple of _STEP on.
_TINY, _STEP = 1 << 12, 64

# What the system says when it has no room for a message just now; anything else means that there is nobody to read it.
_FULL = {errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS}


class _Peer:
    """Another rank, and what it has said."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self.open = True
        self.pieces: dict[int, torch.Tensor] = {}
        self.said: dict[int, tuple[int, int, int]] = {}  # history, piece and where in it, by key
        self.latest = 0


class Shared:
    """What one rank has for its collectives on one group.

    Arguments:
        rank: this process's rank.
        connections: a socket to every other rank, as ``neighbours.connect`` gives them; they are closed with it.
        journal: of the group.
        timeout: seconds after which a collective that a rank did not join is an error.
    """

    def __init__(self, rank: int, connections: Mapping[int, socket.socket], journal: Journal, timeout: float) -> None:
        self._rank = rank
        self._size = len(connections) + 1
        self._peers = [_Peer(other, connection) for other, connection in sorted(connections.items())]
        self._journal = journal
        self._timeout = timeout
        self._pool = Pool(shared)
        self._own: dict[int, tuple[Piece, int]] = {}  # what has been written, and where, by key
        self._lent: dict[int, tuple[Piece, bool]] = {}  # and whether they are sent, by address
        self._returned: list[Piece] = []  # of these, those whose tensors are gone; other threads may add to it
        self._begun: Piece | None = None  # what holds tiny contributions, and up to where it does
        self._end = 0
        self._replaced: list[int] = []  # pieces that the others do not know to be gone
        self._under_way: dict[int, int] = {}  # history, by number
        self._latest = 0
        self._dropped: list[int] = []  # those that nobody waited for; other threads may add to it
        self._done: list[int] = []  # those that the others do not know to be done with here
        self._readers: dict[int, int] = {}  # how many ranks have done with one, by number
        weakref.finalize(self, close, connections)
        self._poll = select.poll()
        self._by_file = {}
        for peer in self._peers:
            peer.connection.setblocking(False)
            self._by_file[peer.connection.fileno()] = peer
            self._poll.register(peer.connection, select.POLLIN)

    def empty(self, numel: int, dtype: torch.dtype, *, sent: bool) -> torch.Tensor | None:
        """Return a new tensor in a piece, or ``None`` where too many are lent already.

        If it is ``sent``, it is reduce-scattered without a copy, and nobody may write into it once its reduction has
        started, because the others read it when it suits them. What is gathered has its memory here too, so that a unit's
        gradients can have what its parameters had.
        """
        self._reclaim()
        if len(self._lent) >= _MOST:
            return None
        piece = self._take(numel * dtype.itemsize)
        tensor = piece.tensor(numel, dtype, self._returned.append)
        self._lent[tensor.data_ptr()] = (piece, sent)
        return tensor

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, number: int) -> Work:
        """See ``Group``; ``number`` is the collective's in the journal, here and below."""
        key = self._put(number, 0, shard)

        def read() -> None:
            for part, theirs in zip(out.view(self._size, -1), self._parts(key, shard.numel(), out.dtype), strict=True):
                part.copy_(theirs)

        return _Reading(self, key, read)

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, number: int) -> Work:
        """See ``Group``."""
        piece, sent = self._lent.get(full.data_ptr(), (None, False))
        key = self._put(number, 0, full, piece if sent and full.is_contiguous() else None)
        begin = self._rank * out.numel()

        def read() -> None:
            parts = self._parts(key, begin + out.numel(), out.dtype)
            add_in_order(out.view(-1), [theirs[begin:] for theirs in parts])

        return _Reading(self, key, read)

    def all_reduce(self, tensor: torch.Tensor, number: int) -> Work:
        """See ``Group``."""
        flat = tensor.view(-1)
        key = self._put(number, 0, flat)
        if self._size <= _FEW or flat.numel() * flat.element_size() <= _SMALL:
            return _Reading(self, key, lambda: add_in_order(flat, self._parts(key, flat.numel(), flat.dtype)))

        parts = flat.tensor_split(self._size)  # sizes may differ by one
        mine = parts[self._rank]
        begin = sum(map(torch.Tensor.numel, parts[: self._rank]))

        def read_and_tell() -> None:
            add_in_order(mine, [theirs[begin:] for theirs in self._parts(key, begin + mine.numel(), flat.dtype)])
            then = 2 * number + 1
            if then not in self._own:  # else somebody waits again, after an interruption
                self._put(number, 1, mine)
            _Arrival(self, then).wait_for(self._journal)
            for rank, part in enumerate(parts):
                if rank != self._rank:
                    part.copy_(self._part(then, rank, part.numel(), flat.dtype))

        return _Reading(self, key, read_and_tell)

    def broadcast(self, tensor: torch.Tensor, src: int, number: int) -> Work:
        """See ``Group``."""
        if src == self._rank:
            return _Reading(self, self._put(number, 0, tensor), lambda: None)
        key = self._put(number, 0, None)
        flat = tensor.view(-1)
        return _Reading(self, key, lambda: flat.copy_(self._part(key, src, flat.numel(), flat.dtype)))

    def _put(self, number: int, phase: int, data: torch.Tensor | None, piece: Piece | None = None) -> int:
        """Write what this rank contributes, unless it is in a piece, and tell the others; return its key."""
        key = 2 * number + phase
        history = self._under_way.setdefault(number, self._journal.history)
        self._latest = max(self._latest, number)
        self._receive(0.0)
        self._reclaim()
        at = 0
        if data is not None:
            if piece is None:
                piece, at = self._room(data.numel() * data.element_size())
                piece.tensor(data.numel(), data.dtype, at=at).copy_(data.reshape(-1))
            else:
                piece.users += 1
            self._own[key] = (piece, at)
        which, file = (0, None) if piece is None else (piece.number, piece.file)
        self._say(key, history, which, at, file)
        if piece is not None:
            piece.close()
        return key

    def _say(self, key: int = 0, history: int = 0, piece: int = 0, at: int = 0, file: int | None = None) -> None:
        """Send the others a message: where to find what, if anything, and what is done with and gone."""
        replaced = self._replaced.pop() if self._replaced else 0
        done = [self._done.pop() if self._done else 0 for _ in range(2)]
        message = _MESSAGE.pack(key, history, piece, at, file is not None, replaced, *done)
        for peer in self._peers:
            self._send(peer, message, file)

    def _take(self, size: int) -> Piece:
        """A piece with one user."""
        piece, replaced = self._pool.take(size)
        self._replaced += [replaced] * (replaced > 0)
        piece.users = 1
        return piece

    def _room(self, size: int) -> tuple[Piece, int]:
        """A piece for so many bytes, with one more user, and where in it: what is tiny shares one with other such."""
        if size > _TINY:
            return self._take(size), 0
        begun = self._begun
        if begun is None or self._end + size > _LEAST:
            if begun is not None:
                self._release(begun)
            begun, self._end = self._take(_LEAST), 0
            self._begun = begun
        at, self._end = self._end, self._end + -(-size // _STEP) * _STEP
        begun.users += 1
        return begun, at

    def _reclaim(self) -> None:
        """Let go of what nobody waits for, and take back the pieces whose tensors are gone."""
        while self._dropped:
            self._forget(self._dropped.pop())
        while self._returned:
            piece = self._returned.pop()
            self._lent = {address: lent for address, lent in self._lent.items() if lent[0] is not piece}
            self._release(piece)

    def _release(self, piece: Piece) -> None:
        piece.users -= 1
        if not piece.users:
            self._pool.give(piece)

    def _send(self, peer: _Peer, message: bytes, file: int | None) -> None:
        end = time.monotonic() + self._timeout
        while peer.open:
            try:
                if file is not None:
                    socket.send_fds(peer.connection, [message], [file], socket.MSG_NOSIGNAL)
                else:
                    peer.connection.send(message, socket.MSG_NOSIGNAL)
                return
            except OSError as error:
                if error.errno not in _FULL:  # it is gone, which the wait for its message will find
                    return
                if time.monotonic() > end:
                    raise RuntimeError(f"Timed out waiting {self._timeout:g} s for rank {peer.rank} to read") from None
                # it has hundreds of messages to read; those to us may be what it waits for
                if not self._receive(0.01):
                    time.sleep(0.001)

    def _receive(self, seconds: float) -> bool:
        """Take a message of each of the others, waiting at most so long for the first; return whether there was any."""
        ready = self._poll.poll(seconds * 1000)
        for file, _ in ready:
            peer = self._by_file[file]
            try:
                message, files, _, _ = socket.recv_fds(peer.connection, _MESSAGE.size, 1, socket.MSG_CMSG_CLOEXEC)
            except (BlockingIOError, ConnectionResetError):  # reset: it went without reading all; what it said is here
                continue
            except OSError:
                message, files = b"", []
            if not message:
                peer.open = False
                self._poll.unregister(peer.connection)
                continue
            key, history, number, at, new, replaced, *done = _MESSAGE.unpack(message)
            peer.pieces.pop(replaced, None)
            if new:
                try:
                    peer.pieces[number] = mapped(files[0])
                except (IndexError, RuntimeError) as error:  # it did not come, or cannot be opened
                    raise OSError(
                        errno.EMFILE,
                        f"the memory of rank {peer.rank} cannot be opened, as where this process has as many open files as "
                        f"it may: raise that limit (ulimit -n), or use init_mesh(shared_memory=False)",
                    ) from error
                finally:
                    for each in files:
                        os.close(each)
            if key >> 1 > self._latest or key >> 1 in self._under_way:  # else it has been given up
                peer.said[key] = (history, number, at)
            peer.latest = max(peer.latest, key >> 1)
            for each in filter(None, done):
                self._count(each)
        return bool(ready)

    def _here(self, key: int) -> bool:
        """Whether every rank has said what there is under a key, or gone on without it; raise if one has ended."""
        here = True
        for peer in self._peers:
            # a second message of one number comes when its sender waits, perhaps after the first of the next
            if key in peer.said or (not key & 1 and peer.latest > key >> 1):
                continue
            if not peer.open:
                raise RuntimeError(f"Connection closed by rank {peer.rank} of the group")
            here = False
        return here

    def _check(self, key: int) -> None:
        """Raise unless every rank came to a key as this one did."""
        history = self._under_way[key >> 1]
        for peer in self._peers:
            if key not in peer.said or peer.said[key][0] != history:
                self._journal.part(key >> 1, peer.rank, peer.latest)

    def _part(self, key: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first elements of what a rank wrote."""
        if rank == self._rank:
            piece, at = self._own[key]
            return piece.tensor(numel, dtype, at=at)
        peer = self._peers[rank - (rank > self._rank)]
        _, number, at = peer.said[key]
        return peer.pieces[number][at : at + numel * dtype.itemsize].view(dtype)

    def _parts(self, key: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The first elements of what each rank wrote, in order of ranks."""
        return [self._part(key, rank, numel, dtype) for rank in range(self._size)]

    def _forget(self, number: int) -> None:
        """Be done with a collective: read, or given up."""
        if self._under_way.pop(number, None) is not None:
            for peer in self._peers:
                for key in (2 * number, 2 * number + 1):
                    peer.said.pop(key, None)
            self._done.append(number)
            large = any(len(self._own[key][0].memory) > _LEAST for key in (2 * number, 2 * number + 1) if key in self._own)
            self._count(number)
            while large and self._done:  # its piece is wanted back at once; of others the next collective tells
                self._say()

    def _count(self, number: int) -> None:
        """Take note that one more rank has done with a collective, the last of which frees what was written for it."""
        readers = self._readers[number] = self._readers.get(number, 0) + 1
        if readers < self._size:
            return
        del self._readers[number]
        for key in (2 * number, 2 * number + 1):
            if key in self._own:
                self._release(self._own.pop(key)[0])


class _Arrival:
    """The others' messages under one key, as ``Journal.wait`` takes it."""

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

    def wait_for(self, journal: Journal) -> None:
        """Wait, and raise on ranks that do something else."""
        journal.wait([self], self._key >> 1)
        self._shared._check(self._key)


class _Reading:
    """A collective under way: what the others contribute is read when somebody waits."""

    __slots__ = ("_arrival", "_key", "_read", "_shared")

    def __init__(self, shared: Shared, key: int, read: Callable[[], object]) -> None:
        self._shared, self._key = shared, key
        self._read: Callable[[], object] | None = read
        self._arrival = _Arrival(shared, key)

    def wait(self) -> None:
        if self._read is None:
            return
        self._arrival.wait_for(self._shared._journal)
        self._read()
        self._read = None
        self._shared._forget(self._key >> 1)

    def __del__(self) -> None:
        if self._read is not None:
            self._shared._dropped.append(self._key >> 1)
