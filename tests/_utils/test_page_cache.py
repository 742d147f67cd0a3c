"""Whether the page cache holds a part of a file is known, or said to be not so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from funcshard._utils import is_cached, page_cache, release_pages

PAGE = 4096


@pytest.fixture
def file(tmp_path: Path):
    (tmp_path / "file").write_bytes(bytes(5 * PAGE + 1))
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_what_was_just_written_is_in_the_cache(file: int) -> None:
    assert is_cached(file, 0, 5 * PAGE + 1)
    assert is_cached(file, PAGE, 2 * PAGE)


@pytest.mark.parametrize("part", [(0, 6 * PAGE + 1), (7 * PAGE, 8 * PAGE)], ids=["too long", "after the end"])
def test_what_a_file_does_not_have_is_not_in_the_cache(file: int, part: tuple[int, int]) -> None:
    assert not is_cached(file, *part)


def test_what_cannot_be_mapped_or_asked_is_said_to_be_elsewhere(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    assert not is_cached(read, 0, PAGE)
    os.close(read), os.close(write)
    monkeypatch.setattr(page_cache, "_of_libc", lambda *_: None)
    assert not is_cached(file, 0, PAGE)


def resident(tensor: torch.Tensor) -> int:
    """Return how many kilobytes of the mapping around a tensor are in this process's memory."""
    found = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (first := line.split()[0]):
            begin, end = (int(each, 16) for each in first.split("-"))
            inside = begin <= tensor.data_ptr() < end
        elif inside and first == "Rss:":
            found = int(line.split()[1])
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system does not list its mappings")
def test_released_pages_of_a_file_are_no_memory_of_the_process_and_can_be_read_again(tmp_path: Path) -> None:
    size = 64 * PAGE
    values = torch.arange(size, dtype=torch.int32).to(torch.uint8)
    (tmp_path / "file").write_bytes(bytes(values.tolist()))
    storage = torch.UntypedStorage.from_file(str(tmp_path / "file"), False, size)
    mapped = torch.empty(0, dtype=torch.uint8).set_(storage, 8, (size - 8,))
    assert torch.equal(mapped, values[8:])
    assert resident(mapped) == size // 1024
    release_pages(mapped)
    assert resident(mapped) == 0
    assert torch.equal(mapped, values[8:])


def test_a_tensor_in_memory_of_its_own_keeps_its_values() -> None:
    own = torch.ones(1 << 20)
    release_pages(own)
    release_pages(own[:0])
    assert own.sum() == 1 << 20
