"""Pieces on disk: any run of elements is a few boxes, and comes back from whoever wrote it."""

from __future__ import annotations

import errno
import math
import os
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcshard.checkpoint.dcp_files import boxes, check_region, read_pieces, write_pieces
from funcshard.checkpoint.flatten_state import Item, Piece
from funcshard.checkpoint.unflatten_state import Request


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_are_a_run_in_its_order(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    numbers = torch.arange(numel).reshape(shape)
    found = boxes(shape, begin, end)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    run: list[int] = []
    for offsets, sizes in found:
        part = numbers
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        run += part.reshape(-1).tolist()
    assert run == list(range(begin, end))


OVER = os.strerror(errno.EFBIG)
VALUES = {
    "a.b": torch.randn(4, 3, 2),
    "scalar": torch.tensor(2.5),
    "half": torch.randn(7).bfloat16(),
    "counter": torch.tensor([3]),
    "mask": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64),
}
ITEMS = {
    name: Item(tuple(value.shape), str(value.dtype).removeprefix("torch."), "sharded", True, name)
    for name, value in VALUES.items()
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory):
    """All values in a folder, the elements of each cut between three ranks."""
    folder, regions = tmp_path_factory.mktemp("pieces"), {}
    for rank in range(3):
        pieces = []
        for name, value in VALUES.items():
            flat = value.reshape(-1)
            low, high = rank * flat.numel() // 3, (rank + 1) * flat.numel() // 3
            if low < high:
                pieces.append(Piece(name, low, flat[low:high]))
        for region in write_pieces(folder, rank, pieces, ITEMS):
            regions.setdefault(region.name, []).append(region)
    return folder, regions


@pytest.mark.parametrize("name", VALUES)
def test_every_run_comes_back(name: str, written) -> None:
    folder, regions = written
    flat = VALUES[name].reshape(-1)
    for begin in range(0, flat.numel(), 5):
        out = torch.empty_like(flat[begin:])
        read_pieces(folder, [Request(name, begin, out)], regions)
        assert torch.equal(out, flat[begin:])


def test_a_missing_piece_is_said(written) -> None:
    folder, regions = written
    with pytest.raises(ValueError, match=r"holds 8 of 24 needed elements of 'a\.b'"):
        read_pieces(
            folder,
            [Request("a.b", 0, torch.empty(24))],
            {"a.b": [region for region in regions["a.b"] if region.file == "__0_0.distcp"]},
        )


def test_every_byte_of_a_file_is_checked(tmp_path: Path) -> None:
    name = "scalar"
    (region,) = write_pieces(tmp_path, 0, [Piece(name, 0, VALUES[name].reshape(-1))], ITEMS)
    check_region(tmp_path, region)
    file = tmp_path / region.file
    whole = file.read_bytes()
    assert len(whole) == region.length
    for place in range(0, len(whole), 97):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"__0_0\.distcp is damaged: the bytes of 'scalar' at 0"):
            read_pieces(tmp_path, [Request(name, 0, torch.empty(1))], {name: [region]})


def test_a_disk_that_is_full_is_said_with_the_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    item = {"x": Item((50_000,), "float32", "sharded", True, "x")}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        with pytest.raises(OSError, match=rf"cannot write .*/__7_0\.distcp: {OVER}"):
            write_pieces(tmp_path, 7, [Piece("x", 0, torch.zeros(50_000))], item)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
