"""Any slice of a raveled tensor is a few boxes, and reads back from the files of all ranks."""

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

from funcshard.checkpoint.dcp_files import check_region, read_slices, write_slices
from funcshard.checkpoint.metadata import TensorMetadata, TensorSlice
from funcshard.checkpoint.read_items import ReadItem
from funcshard.plan import boxes


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_are_a_slice_in_its_order(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    numbers = torch.arange(numel).reshape(shape)
    found = boxes(shape, begin, end)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    elements: list[int] = []
    for offsets, sizes in found:
        part = numbers
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        elements += part.reshape(-1).tolist()
    assert elements == list(range(begin, end))


OVER = os.strerror(errno.EFBIG)
VALUES = {
    "a.b": torch.randn(4, 3, 2),
    "scalar": torch.tensor(2.5),
    "half": torch.randn(7).bfloat16(),
    "counter": torch.tensor([3]),
    "mask": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64),
}
TENSORS = {
    name: TensorMetadata(tuple(value.shape), str(value.dtype).removeprefix("torch."), "sharded", True, name)
    for name, value in VALUES.items()
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory):
    """Write all values into a folder, with the elements of each divided between three ranks."""
    folder, regions = tmp_path_factory.mktemp("slices"), {}
    for rank in range(3):
        slices = []
        for name, value in VALUES.items():
            flat = value.reshape(-1)
            low, high = rank * flat.numel() // 3, (rank + 1) * flat.numel() // 3
            if low < high:
                slices.append(TensorSlice(name, low, flat[low:high]))
        for region in write_slices(folder, rank, slices, TENSORS):
            regions.setdefault(region.name, []).append(region)
    return folder, regions


@pytest.mark.parametrize("name", VALUES)
def test_every_slice_comes_back(name: str, written) -> None:
    folder, regions = written
    flat = VALUES[name].reshape(-1)
    for begin in range(0, flat.numel(), 5):
        out = torch.empty_like(flat[begin:])
        read_slices(folder, [ReadItem(name, begin, out)], regions)
        assert torch.equal(out, flat[begin:])


def test_a_missing_slice_is_said(written) -> None:
    folder, regions = written
    with pytest.raises(ValueError, match=r"holds 8 of 24 needed elements of 'a\.b'"):
        read_slices(
            folder,
            [ReadItem("a.b", 0, torch.empty(24))],
            {"a.b": [region for region in regions["a.b"] if region.file == "__0_0.distcp"]},
        )


def test_every_byte_of_a_file_is_checked(tmp_path: Path) -> None:
    name = "scalar"
    (region,) = write_slices(tmp_path, 0, [TensorSlice(name, 0, VALUES[name].reshape(-1))], TENSORS)
    check_region(tmp_path, region)
    file = tmp_path / region.file
    whole = file.read_bytes()
    assert len(whole) == region.length
    for index in range(0, len(whole), 97):
        file.write_bytes(whole[:index] + bytes([whole[index] ^ 4]) + whole[index + 1 :])
        with pytest.raises(ValueError, match=r"__0_0\.distcp is damaged: the bytes of 'scalar' at 0"):
            read_slices(tmp_path, [ReadItem(name, 0, torch.empty(1))], {name: [region]})


def test_a_disk_that_is_full_is_said_with_the_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    tensors = {"x": TensorMetadata((50_000,), "float32", "sharded", True, "x")}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        with pytest.raises(OSError, match=rf"cannot write .*/__7_0\.distcp: {OVER}"):
            write_slices(tmp_path, 7, [TensorSlice("x", 0, torch.zeros(50_000))], tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
