"""Bytes that are written in blocks are read back in parts, past the page cache and through it."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
import zlib
from pathlib import Path

import pytest
import torch

from funcshard._utils import is_cached
from funcshard.checkpoint import block_files
from funcshard.checkpoint.block_files import BlockWriter, read_ranges

SMALL = 8192  # bytes a block, in these tests


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_files, "BLOCK", SMALL)


def write(path: Path, numbers: list[int]) -> bytes:
    """Write tensors and bytes of these sizes in turn; return all of them."""
    g, written = torch.Generator().manual_seed(0), b""
    with BlockWriter(path) as out:
        for i, number in enumerate(numbers):
            tensor = torch.randint(256, (number,), dtype=torch.uint8, generator=g)
            data = bytes(tensor.tolist())
            if i % 2:
                out.write(data)
            else:
                assert out.write_tensor(tensor) == zlib.crc32(data)
            written += data
            assert out.position == len(written)
    return written


SIZES = {
    "nothing": [],
    "less than a block": [5, 0, 100],
    "one block": [SMALL],
    "one more byte": [SMALL, 1],
    "many blocks and a part of one": [3, 3 * SMALL, 7, 5 * SMALL + 13, 2],
    "whole blocks": [SMALL, 3 * SMALL, SMALL],
}


@pytest.mark.parametrize("name", SIZES)
def test_a_system_that_starts_no_thread_writes_the_same(name: str, tmp_path: Path, monkeypatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")  # Python 3.12 and later

    monkeypatch.setattr(threading.Thread, "start", start)
    assert write(tmp_path / "file", SIZES[name]) == (tmp_path / "file").read_bytes()


@pytest.mark.parametrize("direct", [True, False], ids=["past the cache", "through it"])
@pytest.mark.parametrize("name", SIZES)
def test_what_was_written_is_read_in_any_parts(name: str, direct: bool, tmp_path: Path, monkeypatch) -> None:
    if not direct:
        monkeypatch.setattr(block_files, "_DIRECT", 0)
    whole = write(tmp_path / "file", SIZES[name])
    assert (tmp_path / "file").read_bytes() == whole
    file = os.open(tmp_path / "file", os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
    draw = random.Random(0)
    for _ in range(5):
        ends = sorted(draw.randrange(len(whole) + 1) for _ in range(draw.choice((2, 6))))
        parts = [range_ for range_ in zip(ends[::2], ends[1::2], strict=True) if range_[0] < range_[1]]
        found = b"".join(bytes(view) for view in read_ranges(tmp_path / "file", parts, direct=direct))
        assert found == b"".join(whole[begin:end] for begin, end in parts)
    assert b"".join(bytes(view) for view in read_ranges(tmp_path / "file", [(0, len(whole))])) == whole


def test_a_file_for_which_there_is_no_memory_leaves_no_descriptor_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(size: int) -> None:
        raise MemoryError

    monkeypatch.setattr(block_files, "io_memory", none)
    before = os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else []
    with pytest.raises(MemoryError):
        block_files.BlockWriter(tmp_path / "file")
    assert (os.listdir("/proc/self/fd") if before else []) == before
    assert not list(tmp_path.iterdir())


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3 * SMALL))
    for end in (3 * SMALL + 1, 9 * SMALL):
        with pytest.raises(EOFError, match=f"the file ends at {3 * SMALL}, before "):
            list(read_ranges(tmp_path / "file", [(0, end)]))


def test_a_reader_that_stops_leaves_no_thread(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(20 * SMALL))
    before = threading.active_count()
    views = read_ranges(tmp_path / "file", [(0, 20 * SMALL)])
    next(views)
    views.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("numbers", [[100], [4 * SMALL]], ids=["at the end", "in the thread"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), MemoryError("no memory")], ids=repr)
def test_any_error_of_a_write_is_raised(
    error: Exception, numbers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise error

    before = threading.active_count()
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(type(error), match=r"No space left on device|no memory"):
        write(tmp_path / "file", numbers)
    assert threading.active_count() == before


def test_a_file_system_that_refuses_direct_writes_gets_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not block_files._DIRECT:
        pytest.skip("this system has no O_DIRECT")
    pwrite, refused = os.pwrite, []

    def picky(file: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & block_files._DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(file, data, offset)

    monkeypatch.setattr(os, "pwrite", picky)
    whole = write(tmp_path / "file", [5 * SMALL + 13])
    assert (tmp_path / "file").read_bytes() == whole
    assert refused == [0]


def cached_bytes(path: Path) -> int:
    """Return how many bytes of a file the page cache holds, page by page."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        return sum(is_cached(file.fileno(), begin, min(begin + 4096, size)) for begin in range(0, size, 4096)) * 4096


@pytest.mark.skipif(not block_files._DIRECT, reason="this system has no O_DIRECT")
def test_reading_past_the_cache_leaves_nothing_in_it(tmp_path: Path) -> None:
    path, size = tmp_path / "file", 64 * SMALL
    whole = write(path, [size])
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(path):
        pytest.skip("this file system keeps its files in memory")
    assert b"".join(bytes(view) for view in read_ranges(path, [(0, size)])) == whole
    assert cached_bytes(path) == 0
    os.pread(file, size, 0)
    os.close(file)
    assert cached_bytes(path) == size
    assert b"".join(bytes(view) for view in read_ranges(path, [(0, size)])) == whole


def test_parts_in_the_cache_are_read_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not block_files._DIRECT:
        pytest.skip("this system has no O_DIRECT")
    preadv, ways = os.preadv, []

    def noted(file: int, *arguments: object) -> int:
        ways.append("direct" if fcntl.fcntl(file, fcntl.F_GETFL) & block_files._DIRECT else "cached")
        return preadv(file, *arguments)

    monkeypatch.setattr(os, "preadv", noted)
    monkeypatch.setattr(block_files, "is_cached", lambda file, begin, end: begin >= 2 * SMALL)
    whole = write(tmp_path / "file", [4 * SMALL])
    assert b"".join(bytes(view) for view in read_ranges(tmp_path / "file", [(0, 4 * SMALL)])) == whole
    assert ways[-2:] == ["cached", "cached"]
    assert ways[0] == "direct"
