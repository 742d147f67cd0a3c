"""Released pages leave this process and come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from funcshard._utils.regular_files import release_pages

MIB = 1 << 20
PAGE = 4096


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
