"""Memory for what comes and goes with every unit: handed out as tensors, and used again when nobody refers to them.

The C library gives large blocks back to the system, which then has to hand them out anew, page by page and filled with
zeros: that takes as long as copying a unit's parameters into them. A pool keeps as many pieces as are in use at a time,
each as large as it has had to be; what nobody has needed for long, after a whole model was gathered once, it lets go.

Pieces may be shared with other processes. Such a piece is an anonymous file in memory (``memfd_create``). It has no name
that could be left behind: it is gone when the last process that mapped it is, however that ends.

A rank's shared memory: who needs which piece of it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

__all__ = ["LEAST", "Lender", "Piece", "Pool", "fits", "mapped", "private", "shared", "watched"]

_SMALL = 1 << 16  # bytes that nobody has to save


_IDLE = 200  # pieces taken, during which a free one was not needed: it goes


@dataclass(slots=True, eq=False)
class Piece:
    """A piece of memory.

    Attributes:
        memory: where it is mapped.
        file: its file, if it is shared and not closed yet.
        number: its number in its pool, from 1.
        users: how many need it, where its owner counts them.
        since: how many had been taken from its pool when it came back.
    """

    memory: mmap.mmap
    file: int | None = None
    number: int = 0
    users: int = 0
    since: int = 0

    def tensor(
        self, numel: int, dtype: torch.dtype, freed: Callable[[Piece], object] | None = None, *, at: int = 0
    ) -> torch.Tensor:
        """Return its bytes from ``at`` on as a 1-D tensor; when nobody refers to that any more, ``freed(piece)`` is called.

        That happens on any thread, and wherever Python collects garbage.
        """
        view = memoryview(self.memory)
        if freed is not None:
            weakref.finalize(view, freed, self).atexit = False
        return torch.frombuffer(view, dtype=dtype, count=numel, offset=at)

    def close(self) -> None:
        """Close the file, when everybody has it."""
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def __del__(self) -> None:
        self.close()  # nobody was told of it


def fits(piece: Piece, size: int) -> bool:
    """Whether a piece is for so many bytes; a larger one is for somebody else, who would have to make another."""
    return size <= len(piece.memory) < 2 * max(size, _SMALL)


class Pool:
    """Pieces of one kind.

    Arguments:
        make: makes a piece of at least so many bytes: ``private`` or ``shared``.
    """

    def __init__(self, make: Callable[[int], Piece]) -> None:
        self._make = make
        self._free: list[Piece] = []  # the one that came back first comes first
        self._taken = 0
        self.made = 0
        pool = weakref.ref(self)  # a tensor that outlives the pool does not keep the other pieces

        def back(piece: Piece) -> None:
            own = pool()
            if own is not None:
                own.give(piece)

        self._back = back

    def take(self, size: int) -> tuple[Piece, int]:
        """Take a piece of ``size`` bytes or less than twice as many; ``give`` is the inverse.

        Returns:
            The piece, and the number of one that has gone for it, or 0.
        """
        free = self._free
        self._taken += 1
        # of equal ones the latest, so that those that nobody needs come to the beginning
        fitting = [piece for piece in reversed(free) if fits(piece, size)]
        found = min(fitting, key=lambda piece: len(piece.memory)) if fitting else None
        gone = None
        if found is not None:
            free.remove(found)
            if free and free[0].since + _IDLE < self._taken:
                gone = free[0]
        else:  # of those that are too small the largest gives way
            small = [piece for piece in free if len(piece.memory) < size]
            gone = max(small, key=lambda piece: len(piece.memory)) if small else None
        if gone is not None:
            free.remove(gone)
            gone.close()
        if found is None:
            found = self._make(size)
            self.made += 1
            found.number = self.made
        return found, gone.number if gone is not None else 0

    def has(self, size: int) -> bool:
        """Whether there is a piece to take, without making one."""
        return any(fits(piece, size) for piece in self._free)

    def give(self, piece: Piece) -> None:
        """Give a piece back; ``take`` is the inverse."""
        piece.since = self._taken
        self._free.append(piece)

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new 1-D tensor in a piece, which comes back by itself."""
        return self.take(numel * dtype.itemsize)[0].tensor(numel, dtype, self._back)


def private(size: int) -> Piece:
    """Make a piece of at least ``size`` bytes for this process alone."""
    return Piece(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def shared(size: int) -> Piece:
    """Make a piece of at least ``size`` bytes that other processes can map from its file."""
    file = os.memfd_create("funcshard")
    os.ftruncate(file, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    return Piece(mmap.mmap(file, 0), file)


def mapped(file: int) -> torch.Tensor:
    """Map another process's piece from its file, ``[bytes]`` of uint8; the file may be closed after that."""
    # Python's mmap would keep a file open for each piece of each other rank
    name, size = f"/proc/self/fd/{file}", os.fstat(file).st_size
    with torch.inference_mode(False):  # whatever runs now, it is written to in other modes too
        return torch.from_file(name, shared=True, size=size, dtype=torch.uint8, device="cpu")


def watched(whole: torch.Tensor, numel: int, dtype: torch.dtype, freed: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """Return the first bytes of ``whole`` as a 1-D tensor whose end is noticed, as that of ``Piece.tensor`` is."""
    view = memoryview((ctypes.c_char * (numel * dtype.itemsize)).from_address(whole.data_ptr()))
    weakref.finalize(view, freed, whole).atexit = False  # which keeps the whole as long
    return torch.frombuffer(view, dtype=dtype)


# Bytes of a piece that tiny contributions share.
LEAST = 1 << 16


# Bytes up to which contributions lie side by side in a piece of LEAST, each from a multiple of _STEP on.
_TINY, _STEP = 1 << 12, 64


# Seconds a byte, and at most, that others are waited for before a piece is made, if they have one in use: who is so far
# ahead would wait for them soon, and what is made stays.
_WORTH, _MOST = 1e-8, 0.2


class Lender:
    """Pieces of shared memory, and how many need each.

    Attributes:
        pool: where they come from.
        replaced: numbers of pieces that there are no more, until somebody takes note.
    """

    def __init__(self) -> None:
        self.pool = Pool(shared)
        self.replaced: list[int] = []
        self._begun: Piece | None = None  # what holds tiny contributions, and up to where it does
        self._end = 0

    def take(self, size: int) -> Piece:
        """Take a piece of so many bytes, which one needs; ``release`` is the inverse."""
        piece, replaced = self.pool.take(size)
        self.replaced += [replaced] * (replaced > 0)
        piece.users = 1
        return piece

    def take_soon(self, size: int, busy: Callable[[], Iterable[Piece]], meanwhile: Callable[[float], object]) -> Piece:
        """``take``, which waits a while for one of the pieces that are ``busy``, where else one would have to be made.

        ``meanwhile(seconds)`` takes what comes in that time.
        """
        end = time.monotonic() + min(size * _WORTH, _MOST)
        while not self.pool.has(size) and any(fits(piece, size) for piece in busy()):
            left = end - time.monotonic()
            if left <= 0:
                break
            meanwhile(left)
        return self.take(size)

    def release(self, piece: Piece) -> None:
        """Take note that one less needs a piece."""
        piece.users -= 1
        if not piece.users:
            self.pool.give(piece)

    def room(self, size: int) -> tuple[Piece, int]:
        """A piece for so many bytes, which one more needs, and where in it: what is tiny shares one with other such."""
        if size > _TINY:
            return self.take(size), 0
        begun = self._begun
        if begun is None or self._end + size > LEAST:
            if begun is not None:
                self.release(begun)
            begun, self._end = self.take(LEAST), 0
            self._begun = begun
        at, self._end = self._end, self._end + -(-size // _STEP) * _STEP
        begun.users += 1
        return begun, at
