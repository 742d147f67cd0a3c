"""Memory for the disk begins at a page, keeps its bytes, and survives a fork; released pages come back."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from funcshard._utils import pages
from funcshard._utils.pages import io_memory, release_pages

MIB = 1 << 20
PAGE = 4096


@pytest.mark.parametrize("size", [1, 4096, 2 * MIB - 1, 2 * MIB, 4 * MIB, 5 * MIB + 3])
@pytest.mark.parametrize("without", ["nothing", "huge pages", "the advice for forks"])
def test_memory_begins_at_a_page_and_holds_bytes(size: int, without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if without == "huge pages":
        monkeypatch.setattr(pages, "_HUGE", None)
    if without == "the advice for forks":
        monkeypatch.setattr(pages, "_WIPE_ON_FORK", 999)  # which no system knows
    memory = io_memory(size)
    assert len(memory) == size
    assert not memory.readonly
    assert torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 4096 == 0
    memory[0], memory[-1] = 1, 2
    assert memory[-1] == 2


@pytest.mark.skipif(sys.platform != "linux", reason="the advice for forks is Linux's")
def test_a_forked_process_does_not_share_pages_that_the_disk_writes_to() -> None:
    """If it did, this process would get copies of them, and a read that had begun would miss them."""
    memory = io_memory(4 * MIB)
    memory[:4] = b"here"
    if (child := os.fork()) == 0:
        os._exit(int(bytes(memory[:4]) != bytes(4)))
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(memory[:4]) == b"here"


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
