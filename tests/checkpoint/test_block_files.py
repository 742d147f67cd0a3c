"""Bytes that are written in blocks, past the page cache or through it, are in the file, with their checksums."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import zlib
from pathlib import Path

import pytest
import torch

from funcshard.checkpoint import block_files
from funcshard.checkpoint.block_files import BlockWriter
from funcshard.checkpoint.rank_files import write_text

SMALL, CHECKED = 8192, 3000  # bytes a block and a checksum, in these tests


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_files, "BLOCK", SMALL)
    monkeypatch.setattr(block_files, "CHECKED", CHECKED)


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
                assert out.write_tensor(tensor) == [zlib.crc32(data[n : n + CHECKED]) for n in range(0, number, CHECKED)]
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


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")  # Python 3.12 and later


WAYS = {
    "past the cache": lambda patch: None,
    "through it": lambda patch: patch.setattr(block_files, "_DIRECT", 0),
    "without a thread": lambda patch: patch.setattr(threading.Thread, "start", no_thread),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SIZES)
def test_what_was_written_is_in_the_file(name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WAYS[way](monkeypatch)
    assert write(tmp_path / "file", SIZES[name]) == (tmp_path / "file").read_bytes()


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


def test_an_index_is_whole_when_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    write_text(tmp_path / "index", "{}")
    assert synced == [(tmp_path / "index").stat().st_size]
