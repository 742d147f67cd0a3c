"""Files that are written once, in blocks that need not pass through the page cache.

The page cache costs a fault and a copy for every 4 KiB, and takes memory from training. So large
files are written with O_DIRECT where the system has it. A thread writes one block while the next
one is filled.
"""

from __future__ import annotations

import os
import queue
import threading
import zlib
from pathlib import Path
from types import TracebackType

import torch

from funcshard._utils.pages import io_memory
from funcshard._utils.tensors import byte_view

BLOCK = 4 << 20  # bytes; on one NVMe disk, 1 MiB was 15 % slower and 16 MiB 40 %
# Bytes that have one checksum: they are summed up while they are still in the processor's cache.
CHECKED = 512 << 10
_PAGE = 4096  # O_DIRECT takes offsets and sizes in multiples of it
_DIRECT: int = getattr(os, "O_DIRECT", 0)


class _Block:
    __slots__ = ("begin", "bytes", "size", "view")

    def __init__(self, size: int) -> None:
        self.view = io_memory(size)
        self.bytes = torch.frombuffer(self.view, dtype=torch.uint8)
        self.size = self.begin = 0


class BlockWriter:
    """A file that you write from its beginning to its end; a context manager that syncs it."""

    def __init__(self, path: Path) -> None:
        self.position = 0
        self._block = _Block(BLOCK)  # first: if there is no memory for it, no file stays open
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._free: queue.SimpleQueue[_Block] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[_Block | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def write(self, data: bytes) -> None:
        remaining_bytes = memoryview(data)
        while remaining_bytes:
            block = self._block
            size = min(BLOCK - block.size, len(remaining_bytes))
            block.view[block.size : block.size + size] = remaining_bytes[:size]
            remaining_bytes = remaining_bytes[size:]
            self._added(size)

    def write_tensor(self, data: torch.Tensor) -> list[int]:
        """Add a tensor's elements, and return the CRC-32 of every ``CHECKED`` bytes."""
        checksums: list[int] = []
        done_bytes, source_bytes = 0, byte_view(data)
        while done_bytes < source_bytes.numel():
            block = self._block
            block_offset = done_bytes % CHECKED
            size = min(
                BLOCK - block.size, source_bytes.numel() - done_bytes, CHECKED - block_offset
            )
            block.bytes[block.size : block.size + size].copy_(
                source_bytes[done_bytes : done_bytes + size]
            )
            # Note: a checksum goes on where the last piece of its bytes ended.
            checksum = checksums.pop() if block_offset else 0
            checksums.append(zlib.crc32(block.view[block.size : block.size + size], checksum))
            done_bytes += size
            self._added(size)
        return checksums

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None
    ) -> None:
        try:
            self._end()
            if kind is None:
                self._raise()
                _write(self._file, self._block.view[: self._block.size], self._block.begin)
                os.fsync(self._file)
        finally:
            os.close(self._file)

    def _added(self, size: int) -> None:
        self._block.size += size
        self.position += size
        if self._block.size == BLOCK:
            self._hand_over()

    def _hand_over(self) -> None:
        """Give the full block to the thread, and continue with another one."""
        if self._thread is None and not self._start():
            _write(self._file, self._block.view, self._block.begin)
        else:
            # Note: with two blocks, one is filled while the other one is written.
            self._full.put(self._block)
            self._block = self._free.get()
        self._block.begin, self._block.size = self.position, 0
        self._raise()

    def _start(self) -> bool:
        """Start the thread, and return whether the system has one."""
        block_thread = threading.Thread(
            target=self._run, name=f"{threading.current_thread().name}, blocks"
        )
        try:
            block_thread.start()
        except RuntimeError:
            # Note: from Python 3.12 on, none starts after the end of the program, when a save in
            # the background may still run.
            return False
        _set_direct(self._file, True)
        self._free.put(_Block(BLOCK))
        self._thread = block_thread
        return True

    def _run(self) -> None:
        while (block := self._full.get()) is not None:
            try:
                if self._error is None:
                    _write(self._file, block.view[: block.size], block.begin)
            except Exception as error:  # any: a thread that ended would leave the writer waiting
                self._error = error
            self._free.put(block)

    def _end(self) -> None:
        if self._thread is not None:
            self._full.put(None)
            self._thread.join()
            _set_direct(self._file, False)  # the last block may have any size

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        try:
            written_bytes = os.pwrite(file, data, offset)
        except OSError:
            if not _set_direct(file, False):
                raise
            continue  # a file system that opens files for O_DIRECT and does not write them so
        # Note: a short write leaves a rest that O_DIRECT does not take.
        if written_bytes % _PAGE:
            _set_direct(file, False)
        data, offset = data[written_bytes:], offset + written_bytes


def _set_direct(file: int, direct: bool) -> bool:
    """Try to switch O_DIRECT on or off; return whether it was changed."""
    if not _DIRECT:
        return False
    import fcntl

    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    if bool(flags & _DIRECT) == direct:
        return False
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags ^ _DIRECT)
    except OSError:  # tmpfs, before Linux 6.6
        return False
    return True
