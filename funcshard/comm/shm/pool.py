"""Blocks of memory that are used again: private ones, and ones that several processes share.

The C library returns freed blocks of a unit's size to the system, which fills the next one with
zeros, page by page: that takes as long as copying a unit's parameters into it. A ``Pool`` keeps
freed blocks instead, as many as are in use at one time.

A shared block is an anonymous file in memory (``memfd_create``) that other processes can map. It
has no name, so the system frees it with the last process that mapped it, even if that is killed.
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

# A block of less than twice as many bytes serves every size that it can hold.
_SMALL_BYTES = 1 << 16
_IDLE_TAKES = (
    200  # a pool drops a free block that was not needed while this many blocks were taken
)

SLAB_BYTES = 1 << 16  # size of a slab, a block that holds many tiny contributions
_TINY_BYTES = 1 << 12  # largest contribution that goes into a slab
_SLAB_ALIGNMENT = 64  # bytes; every contribution in a slab begins at a multiple of this

# How long to wait for a busy block before making another one, in seconds per byte and at most.
_WAIT_PER_BYTE = 1e-8
_MAX_WAIT = 0.2


@dataclass(slots=True, eq=False)
class Block:
    """A block of memory.

    Attributes:
        memory: the mapping of the block in this process.
        file: descriptor of the block's file; ``None`` without, and once it is closed.
        number: its number in the pool, from 1.
        uses: number of collectives that need the block.
        idle_since: number of blocks that were taken from the pool before this one came back.
    """

    memory: mmap.mmap
    file: int | None = None
    number: int = 0
    uses: int = 0
    idle_since: int = 0

    def __len__(self) -> int:
        return len(self.memory)

    def tensor(
        self,
        numel: int,
        dtype: torch.dtype,
        on_free: Callable[[Block], object] | None = None,
        *,
        offset: int = 0,
    ) -> torch.Tensor:
        """Return a 1-D tensor over the block's bytes from ``offset`` on.

        Once no tensor refers to these bytes, ``on_free(block)`` is called, on any thread and at any
        point where Python collects garbage.
        """
        view = memoryview(self.memory)
        if on_free is not None:
            weakref.finalize(view, on_free, self).atexit = False
        return torch.frombuffer(view, dtype=dtype, count=numel, offset=offset)

    def close(self) -> None:
        """Close the file; all mappings stay."""
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def __del__(self) -> None:
        self.close()  # a block that was never announced to other ranks still has its file open


def private_block(size: int) -> Block:
    """Make a block of at least ``size`` bytes for this process alone."""
    return Block(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def shared_block(size: int) -> Block:
    """Make a block of at least ``size`` bytes that other processes can map."""
    file = os.memfd_create("funcshard")
    os.ftruncate(file, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    return Block(mmap.mmap(file, 0), file)


def map_block(file: int) -> torch.Tensor:
    """Map another process's block from its file, which may be closed then, as 1-D uint8."""
    # Why not mmap.mmap: it keeps one file open for each mapped block of each other rank.
    file_name, file_bytes = f"/proc/self/fd/{file}", os.fstat(file).st_size
    # Why inference mode is off: a tensor made in inference mode cannot be written to outside it,
    # and this mapping outlives the mode in which its message arrived.
    with torch.inference_mode(False):
        return torch.from_file(
            file_name, shared=True, size=file_bytes, dtype=torch.uint8, device="cpu"
        )


def tracked_view(
    memory: torch.Tensor,
    numel: int,
    dtype: torch.dtype,
    on_free: Callable[[torch.Tensor], object],
) -> torch.Tensor:
    """Return a 1-D tensor over the first bytes of ``memory``, which lives as long.

    ``on_free(memory)`` is called as by ``Block.tensor``.
    """
    view = memoryview(
        (ctypes.c_char * (numel * dtype.itemsize)).from_address(memory.data_ptr())
    )
    weakref.finalize(
        view, on_free, memory
    ).atexit = False  # the finalizer keeps ``memory`` alive
    return torch.frombuffer(view, dtype=dtype)


def fits(block: Block, size: int) -> bool:
    """Return whether a block serves ``size`` bytes, and is not twice too large."""
    # Why not every block that is large enough: at 2 ranks the gradients that a unit writes take
    # half as much memory as its gathered buffer. If they took the buffer's block, the next
    # all-gather would have to make a new one.
    return size <= len(block) < 2 * max(size, _SMALL_BYTES)


class Pool:
    """Blocks of one kind, taken and given back.

    Arguments:
        make: ``private_block`` or ``shared_block``.

    Attributes:
        made: number of blocks made so far.
    """

    def __init__(self, make: Callable[[int], Block]) -> None:
        self._make = make
        self._free: list[Block] = []  # in the order in which the blocks came back
        self._takes = 0
        self.made = 0
        # Why weak: a tensor that outlives the pool must not keep the pool's other blocks.
        give_back = weakref.WeakMethod(self.give_back)
        self._on_free = lambda block: (method := give_back()) and method(block)

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new 1-D tensor in a block, which comes back when the tensor is gone."""
        return self.take(numel * dtype.itemsize).tensor(numel, dtype, self._on_free)

    def take(self, size: int) -> Block:
        """Take the smallest free block that fits, or make one; ``give_back`` is the inverse."""
        free_blocks = self._free
        self._takes += 1
        # Why reversed: of equal blocks the pool takes the one that came back last, so blocks that
        # are not needed move to the front of the list.
        fitting_blocks = [block for block in reversed(free_blocks) if fits(block, size)]
        if not fitting_blocks:
            # A new block replaces the largest of the free blocks that are too small.
            small_blocks = [block for block in free_blocks if len(block) < size]
            if small_blocks:
                self.drop(max(small_blocks, key=len))
            new_block = self._make(size)
            self.made += 1
            new_block.number = self.made
            return new_block
        free_block = min(fitting_blocks, key=len)
        free_blocks.remove(free_block)
        # Note: it was not needed for long, such as one of a model that was gathered once.
        if free_blocks and free_blocks[0].idle_since + _IDLE_TAKES < self._takes:
            self.drop(free_blocks[0])
        return free_block

    def give_back(self, block: Block) -> None:
        block.idle_since = self._takes
        self._free.append(block)

    def drop(self, block: Block) -> None:
        """Forget a free block."""
        self._free.remove(block)
        block.close()

    def has(self, size: int) -> bool:
        """Return whether ``take(size)`` finds a free block."""
        return any(fits(block, size) for block in self._free)


class SharedBlocks(Pool):
    """The shared blocks of one rank, and how many collectives need each of them.

    Attributes:
        dropped: numbers of dropped blocks that no message has named yet.
    """

    def __init__(self) -> None:
        super().__init__(shared_block)
        self.dropped: list[int] = []
        self._slab: Block | None = None  # the slab that is being filled
        self._slab_end = 0  # its first free byte

    def drop(self, block: Block) -> None:
        super().drop(block)
        self.dropped.append(block.number)

    def take(self, size: int) -> Block:
        """Take a block of ``size`` bytes for one collective; ``release`` is the inverse."""
        block = super().take(size)
        block.uses = 1
        return block

    def take_or_wait(
        self,
        size: int,
        busy: Callable[[], Iterable[Block]],
        receive: Callable[[float], object],
    ) -> Block:
        """Take a block; first wait a short while if a busy block would spare making one.

        Arguments:
            size: number of bytes.
            busy: returns the blocks that only peers still need.
            receive: handles the messages that arrive within so many seconds.
        """
        # Why waiting pays: a rank that is so far ahead of its peers would soon wait for them
        # anyway, and the pool keeps every block that it makes. Because the wait is limited (70 ms
        # for 7 MiB), this rank never depends on its peers.
        end_time = time.monotonic() + min(size * _WAIT_PER_BYTE, _MAX_WAIT)
        while not self.has(size) and any(fits(block, size) for block in busy()):
            seconds_left = end_time - time.monotonic()
            if seconds_left <= 0:
                break
            receive(seconds_left)
        return self.take(size)

    def reserve(self, size: int) -> tuple[Block, int]:
        """Reserve ``size`` bytes for one collective; return the block and the offset in it."""
        if size > _TINY_BYTES:
            return self.take(size), 0
        # Why slabs: the mapping of each shared block keeps a file open in the process that made it.
        slab = self._slab
        if slab is None or self._slab_end + size > SLAB_BYTES:
            if slab is not None:
                self.release(slab)
            # The slab that is being filled has one use more.
            slab, self._slab_end = self.take(SLAB_BYTES), 0
            self._slab = slab
        offset = self._slab_end
        self._slab_end += -(-size // _SLAB_ALIGNMENT) * _SLAB_ALIGNMENT
        slab.uses += 1
        return slab, offset

    def release(self, block: Block) -> None:
        """End one collective's use of a block, which returns to the pool after the last."""
        block.uses -= 1
        if not block.uses:
            self.give_back(block)
