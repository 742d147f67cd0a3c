"""Memory for the disk begins at a page, keeps its bytes, and survives a fork."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from funcshard._utils import huge_pages, io_memory

MIB = 1 << 20


@pytest.mark.parametrize("size", [1, 4096, 2 * MIB - 1, 2 * MIB, 4 * MIB, 5 * MIB + 3])
@pytest.mark.parametrize("without", ["nothing", "huge pages", "the advice for forks"])
def test_memory_begins_at_a_page_and_holds_bytes(size: int, without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if without == "huge pages":
        monkeypatch.setattr(huge_pages, "_HUGE", None)
    if without == "the advice for forks":
        monkeypatch.setattr(huge_pages, "_WIPE_ON_FORK", 999)  # which no system knows
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
