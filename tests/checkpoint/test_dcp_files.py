"""Any slice of a raveled tensor is a few boxes, and reads back from the files of all ranks."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcshard.checkpoint import block_files, dcp_files
from funcshard.checkpoint.dcp_files import Region, check_region, read_slices, write_slices
from funcshard.checkpoint.metadata import TensorMetadata, TensorSlice
from funcshard.checkpoint.read_items import ReadItem
from funcshard.plan import boxes


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
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


VALUES = {
    "a.b": torch.randn(4, 3, 2),
    "scalar": torch.tensor(2.5),
    "half": torch.randn(7).bfloat16(),
    "counter": torch.tensor([3]),
    "one of a column": torch.randn(1, 5)[:, 2],
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


def test_archives_of_torch_are_read_too(tmp_path: Path) -> None:
    torch.save(VALUES["a.b"], tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    region = Region("a.b", 0, (0, 0, 0), (4, 3, 2), "file", 0, len(data), zlib.crc32(data))
    out = torch.empty(5)
    read_slices(tmp_path, [ReadItem("a.b", 9, out)], {"a.b": [region]})
    assert torch.equal(out, VALUES["a.b"].reshape(-1)[9:14])
    with pytest.raises(ValueError, match=r"file holds other data than .*: found \(4, 3, 2\) and .* in place of \(2, 4, 3\)"):
        read_slices(tmp_path, [ReadItem("a.b", 9, out)], {"a.b": [replace(region, sizes=(2, 4, 3))]})


def test_an_archive_that_ends_in_another_way_is_refused(tmp_path: Path) -> None:
    (region,) = write_slices(tmp_path, 0, [TensorSlice("half", 0, VALUES["half"])], TENSORS)
    file = tmp_path / region.file
    data = file.read_bytes()[:-1] + b"x"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"holds other data than .*: its archive ends in another way"):
        read_slices(
            tmp_path,
            [ReadItem("half", 0, torch.empty(7).bfloat16())],
            {"half": [replace(region, checksum=zlib.crc32(data))]},
        )


def test_slices_of_any_size_come_back_to_tensors_that_begin_anywhere(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(block_files, "BLOCK", 4096)
    values = {f"x{i}": torch.randn(n) for i, n in enumerate((1, 3000, 5, 9001, 1024))}
    tensors = {name: TensorMetadata((v.numel(),), "float32", "sharded", True, name) for name, v in values.items()}
    found = write_slices(tmp_path, 0, [TensorSlice(name, 0, value) for name, value in values.items()], tensors)
    regions = {region.name: [region] for region in found}
    whole = torch.full((sum(v.numel() for v in values.values()) + 3,), -1.0)
    reads, begin = [], 3
    for name, value in values.items():
        reads.append(ReadItem(name, 0, whole[begin : begin + value.numel()]))
        begin += value.numel()
    reads.append(ReadItem("x3", 4321, part := torch.empty(99)))  # two places for one region
    read_slices(tmp_path, reads, regions)
    assert torch.equal(whole, torch.cat([torch.full((3,), -1.0), *values.values()]))
    assert torch.equal(part, values["x3"][4321:4420])


def test_the_list_of_boxes_for_dcp_is_written_in_small_parts_and_is_what_dcp_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.checkpoint import FileSystemReader, metadata

    sizes: list[int] = []
    part = dcp_files._part
    monkeypatch.setattr(dcp_files, "_part", lambda value: (found := part(value), sizes.append(len(found)))[0])
    ranks = 20
    tensors = {f"layer.{i}.w": TensorMetadata((ranks, 8), "bfloat16", "sharded", True, "x") for i in range(30)}
    tensors["empty"] = TensorMetadata((0, 3), "float32", "sharded", True, "x")
    names = [name for name in tensors if name != "empty"]
    regions = [dcp_files.Region(n, r * 8, (r, 0), (1, 8), f"__{r}_0.distcp", r, 100, 0) for r in range(ranks) for n in names]
    dcp_files.write_metadata(tmp_path, regions, tensors, {"shard": ranks})
    assert max(sizes) < 4000 < (tmp_path / ".metadata").stat().st_size / 20  # between two parts, other threads go on
    found = FileSystemReader(tmp_path).read_metadata()
    assert found.state_dict_metadata.keys() == tensors.keys()
    assert found.state_dict_metadata["empty"].chunks == []
    tensor = found.state_dict_metadata["layer.3.w"]
    assert (tensor.size, tensor.properties.dtype) == ((ranks, 8), torch.bfloat16)
    assert [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks] == [((r, 0), (1, 8)) for r in range(ranks)]
    where = found.storage_data[metadata.MetadataIndex("layer.3.w", torch.Size([7, 0]))]
    assert (where.relative_path, where.offset, where.length) == ("__7_0.distcp", 7, 100)
    assert len(found.storage_data) == len(regions)
    assert [each.name for each in tmp_path.iterdir()] == [".metadata"]
