"""Shared memory in segments: one process writes into them, others map and read them.

A segment is an anonymous file in memory (``memfd_create``). It has no name that could be left behind: it is gone when the
last process that mapped it is, however that ends.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["Segment", "Segments", "Taken", "mapped"]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A segment of this process's own.

    Attributes:
        number: its number among them.
        data: its memory, ``[bytes]`` of uint8.
    """

    number: int
    data: torch.Tensor


class Taken(NamedTuple):
    """What ``Segments.take`` found.

    Attributes:
        segment: the segment.
        file: its file, to be sent to its readers and closed, if it is new; else ``None``.
        replaced: number of the segment that it stands in for and that readers may forget, ``-1`` for none.
    """

    segment: Segment
    file: int | None
    replaced: int


class Segments:
    """The segments of one process: as many as were ever in use at a time, each as large as it has had to be."""

    def __init__(self) -> None:
        self._free: list[Segment] = []
        self._made = 0

    def take(self, size: int) -> Taken:
        """Take a free segment of at least ``size`` bytes; ``give`` is the inverse."""
        free = sorted(self._free, key=lambda segment: segment.data.numel())
        for segment in free:
            if segment.data.numel() >= size:
                self._free.remove(segment)
                return Taken(segment, None, -1)
        replaced = -1
        if free:  # all are too small: the largest gives way
            self._free.remove(free[-1])
            replaced = free[-1].number
        file = os.memfd_create("funcshard")
        os.ftruncate(file, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._made += 1
        return Taken(Segment(self._made, mapped(file)), file, replaced)

    def give(self, segment: Segment) -> None:
        """Give a segment back; ``take`` is the inverse."""
        self._free.append(segment)


def mapped(file: int) -> torch.Tensor:
    """Map a segment's file, ``[bytes]`` of uint8; the file may be closed after that."""
    return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
