"""Memory for what comes and goes with every unit: handed out as tensors, and used again when nobody refers to them.

The C library gives large blocks back to the system, which then has to hand them out anew, page by page and filled with
zeros: that takes as long as copying a unit's parameters into them. A pool keeps as many pieces as were ever in use at a
time, each as large as it has had to be.

Pieces may be shared with other processes. Such a piece is an anonymous file in memory (``memfd_create``). It has no name
that could be left behind: it is gone when the last process that mapped it is, however that ends.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Piece", "Pool", "mapped", "private", "shared"]


@dataclass(slots=True, eq=False)
class Piece:
    """A piece of memory.

    Attributes:
        memory: where it is mapped.
        file: its file, if it is shared and not closed yet.
        number: its number in its pool, from 1.
        users: how many need it, where its owner counts them.
    """

    memory: mmap.mmap
    file: int | None = None
    number: int = 0
    users: int = 0

    def tensor(self, numel: int, dtype: torch.dtype, freed: Callable[[Piece], object] | None = None) -> torch.Tensor:
        """Return its beginning as a 1-D tensor; ``freed(piece)`` is called when nobody refers to that any more."""
        view = memoryview(self.memory)
        if freed is not None:
            weakref.finalize(view, freed, self).atexit = False
        return torch.frombuffer(view, dtype=dtype, count=numel)

    def close(self) -> None:
        """Close the file, when everybody has it."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


class Pool:
    """Pieces of one kind.

    Arguments:
        make: makes a piece of at least so many bytes: ``private`` or ``shared``.
    """

    def __init__(self, make: Callable[[int], Piece]) -> None:
        self._make = make
        self._free: list[Piece] = []
        self.made = 0

    def take(self, size: int) -> tuple[Piece, int]:
        """Take a free piece of at least ``size`` bytes, and the number of one it replaces, or 0; ``give`` is the inverse."""
        free = self._free
        if free:
            fitting = [piece for piece in free if len(piece.memory) >= size]
            if fitting:
                found = min(fitting, key=lambda piece: len(piece.memory))
                free.remove(found)
                return found, 0
        replaced = 0
        if free:  # all are too small: the largest gives way
            least = max(free, key=lambda piece: len(piece.memory))
            free.remove(least)
            least.close()
            replaced = least.number
        self.made += 1
        new = self._make(size)
        new.number = self.made
        return new, replaced

    def give(self, piece: Piece) -> None:
        """Give a piece back; ``take`` is the inverse."""
        self._free.append(piece)

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new 1-D tensor in a piece, which comes back by itself."""
        return self.take(numel * dtype.itemsize)[0].tensor(numel, dtype, self.give)


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
    return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
