"""Files that are written and read once, in blocks that need not pass through the page cache.

A checkpoint is read rarely, and then often by another process or machine. A page of the cache costs
a page fault and a copy for every 4 KiB, and takes memory from training. So large files are written
and read with O_DIRECT where the system and the file system have it, in blocks of memory that are
used again. A thread writes one block while the next one is filled, and reads one block ahead.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import torch

from funcshard._utils import byte_view, io_memory, is_cached, open_regular

BLOCK = 4 << 20  # bytes; on one NVMe disk, 1 MiB was 15 % slower and 16 MiB 40 %
# Bytes that are copied, and then summed up while they are still in the processor's cache.
HOT = 512 << 10
_PAGE = 4096  # O_DIRECT takes offsets and sizes in multiples of it
_DIRECT: int = getattr(os, "O_DIRECT", 0)


class _Block:
    """A block of memory, as a tensor and as a buffer."""

    __slots__ = ("begin", "bytes", "size", "view")

    def __init__(self, size: int) -> None:
        self.view = io_memory(size)
        self.bytes = torch.frombuffer(self.view, dtype=torch.uint8)
        self.size = self.begin = 0


class BlockWriter:
    """A file that is written from its beginning to its end; a context manager that syncs it.

    Arguments:
        path: the file to make.

    Attributes:
        position: number of bytes that were written.
    """

    def __init__(self, path: Path) -> None:
        self.position = 0
        self._block = _Block(BLOCK)  # first: if there is no memory for it, no file stays open
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._free: queue.SimpleQueue[_Block] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[_Block | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def write(self, data: bytes) -> None:
        """Add bytes to the file."""
        remaining = memoryview(data)
        while remaining:
            block = self._block
            size = min(BLOCK - block.size, len(remaining))
            block.view[block.size : block.size + size] = remaining[:size]
            remaining = remaining[size:]
            self._added(size)

    def write_tensor(self, data: torch.Tensor) -> int:
        """Add the elements of a tensor to the file, and return the CRC-32 of their bytes."""
        checksum, done, source = 0, 0, byte_view(data)
        while done < source.numel():
            block = self._block
            size = min(BLOCK - block.size, source.numel() - done, HOT)
            block.bytes[block.size : block.size + size].copy_(source[done : done + size])
            checksum = zlib.crc32(block.view[block.size : block.size + size], checksum)
            done += size
            self._added(size)
        return checksum

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
        """Give the full block to the thread, and go on with another one."""
        if self._thread is None and not self._start():
            _write(self._file, self._block.view, self._block.begin)
        else:
            self._full.put(self._block)
            self._block = self._free.get()
        self._block.begin, self._block.size = self.position, 0
        self._raise()

    def _start(self) -> bool:
        """Start the thread, and return whether the system has one.

        From Python 3.12 on, none starts after the end of the program, when a save in the background
        may still run.
        """
        thread = threading.Thread(
            target=self._run, name=f"{threading.current_thread().name}, blocks"
        )
        try:
            thread.start()
        except RuntimeError:
            return False
        _set_direct(self._file, True)
        self._free.put(_Block(BLOCK))
        self._thread = thread
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
            done = os.pwrite(file, data, offset)
        except OSError:
            if not _set_direct(file, False):
                raise
            continue  # a file system that opens files for O_DIRECT and does not write them so
        if done % _PAGE:
            _set_direct(file, False)
        data, offset = data[done:], offset + done


def _set_direct(file: int, direct: bool) -> bool:
    """Try to switch O_DIRECT of a file on or off; return whether it was changed."""
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


# --- reading --------------------------------------------------------------------------------------


def open_file(path: Path, at: int | None = None) -> int:
    """Open a file for reading, and return its descriptor.

    Arguments:
        path: the file.
        at: descriptor of the folder that holds it. Why not ``path`` then: another folder may have
            its name meanwhile.

    Raises:
        ValueError: it is no regular file, but a link or a pipe.
    """
    with in_folder(path, at) as name:
        return open_regular(name, links=False, folder=at)


@contextlib.contextmanager
def in_folder(path: Path, at: int | None) -> Iterator[Path]:
    """Give the path of a file from the folder ``at`` on, and put that folder before errors."""
    try:
        yield path if at is None else Path(path.name)
    except ValueError as error:
        raise error if at is None else ValueError(f"{path.parent}{os.sep}{error}") from None


def read_ranges(
    path: Path, ranges: Sequence[tuple[int, int]], *, direct: bool = True, at: int | None = None
) -> Iterator[memoryview]:
    """Yield the bytes of parts of a file in turn, in views of memory that is used again.

    A view holds these bytes until the next one is asked for. Parts of the file that are in the page
    cache are read from there.

    Arguments:
        path: the file.
        ranges: first and last position, as ``range`` has them, of each part.
        direct: whether the rest is read past the page cache; not if several processes of one
            machine read the same parts.
        at: as in ``open_file``.

    Raises:
        EOFError: the file ends earlier.
        ValueError: it is no regular file, but a link or a pipe.
    """
    pieces = list(_pieces(ranges))
    with open(open_file(path, at), "rb", buffering=0) as file:
        if sum(end - begin for begin, end in pieces) <= BLOCK:
            block = _Block(max((end - begin for begin, end in pieces), default=1))
            for begin, end in pieces:
                _read(file.fileno(), -1, block.view, begin, end)
                yield block.view[: end - begin]
            return
        yield from _read_ahead(path, at, file.fileno(), pieces, direct)


def _pieces(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join parts that follow each other, and cut them into blocks that begin at pages."""
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and begin == joined[-1][1]:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    for begin, end in joined:
        while begin < end:
            stop = min(begin // _PAGE * _PAGE + BLOCK, end)
            yield begin, stop
            begin = stop


def _read_ahead(
    path: Path, at: int | None, file: int, pieces: Sequence[tuple[int, int]], direct: bool
) -> Iterator[memoryview]:
    free: queue.SimpleQueue[_Block | None] = queue.SimpleQueue()
    full: queue.SimpleQueue[_Block | Exception] = queue.SimpleQueue()
    past = -1
    if direct and _DIRECT:
        with contextlib.suppress(OSError):
            past = os.open(path if at is None else path.name, os.O_RDONLY | _DIRECT, dir_fd=at)

    def run() -> None:
        for begin, end in pieces:
            if (block := free.get()) is None:
                return
            low = begin // _PAGE * _PAGE
            try:
                _read(file, past, block.view, low, end)
            except Exception as error:
                full.put(error)
                return
            block.begin, block.size = begin - low, end - low
            full.put(block)

    for _ in range(2):
        free.put(_Block(BLOCK))
    thread = threading.Thread(
        target=run, name=f"{threading.current_thread().name}, blocks", daemon=True
    )
    thread.start()
    try:
        for _ in pieces:
            block = full.get()
            if isinstance(block, Exception):
                raise block
            yield block.view[block.begin : block.size]
            free.put(block)
    finally:
        free.put(None)
        thread.join()
        if past >= 0:
            os.close(past)


def _read(file: int, past: int, view: memoryview, begin: int, end: int) -> None:
    """Read ``begin : end`` of a file to the beginning of ``view``.

    ``past`` is the same file, opened with O_DIRECT, or -1.
    """
    size = end - begin
    done = 0
    if past >= 0 and not is_cached(file, begin, end):
        # Some file systems open a file for O_DIRECT, and cannot read it so.
        with contextlib.suppress(OSError):
            done = os.preadv(past, [view[: -(-size // _PAGE) * _PAGE]], begin)
    while done < size:
        read_bytes = os.preadv(file, [view[done:size]], begin + done)
        if not read_bytes:
            raise EOFError(f"the file ends at {begin + done}, before {end}")
        done += read_bytes
