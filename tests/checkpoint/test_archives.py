"""The bytes around a tensor are an archive that ``torch.load`` and zip programs read."""

from __future__ import annotations

import io
import random
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from funcshard._utils import byte_view
from funcshard.checkpoint.archives import head_of, joined_checksum, tail_of

TENSORS = {
    "floats": torch.randn(3, 4),
    "a scalar": torch.tensor(2.5, dtype=torch.float64),
    "no dimension of one": torch.randn(1, 1, 5).half(),
    "bfloat16": torch.randn(7).bfloat16(),
    "float8": torch.randn(9).to(torch.float8_e4m3fn),
    "bools": torch.tensor([[True, False]]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "uint16": torch.arange(5).to(torch.uint16),
    "int8": torch.arange(-3, 3, dtype=torch.int8),
}


def archive(tensor: torch.Tensor) -> bytes:
    data = bytes(byte_view(tensor).tolist())
    head, tail = head_of(tensor.dtype, tensor.shape), tail_of(tensor.dtype, tensor.shape, zlib.crc32(data))
    return head + data + tail


@pytest.mark.parametrize("name", TENSORS)
def test_torch_and_zip_programs_read_it(name: str) -> None:
    tensor, found = TENSORS[name], archive(TENSORS[name])
    loaded = torch.load(io.BytesIO(found), weights_only=True)
    assert (loaded.dtype, loaded.shape, loaded.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(byte_view(loaded), byte_view(tensor))
    ours = zipfile.ZipFile(io.BytesIO(found))
    assert ours.testzip() is None
    assert len(head_of(tensor.dtype, tensor.shape)) % 64 == 0
    # Programs that read from front to back take an entry's flags, such as "encrypted", from before its data.
    for entry in ours.infolist():
        assert int.from_bytes(found[entry.header_offset + 6 :][:2], "little") == entry.flag_bits
    torch.save(tensor, file := io.BytesIO())
    theirs = zipfile.ZipFile(file)
    assert all(ours.read(name) == theirs.read(name) for name in ours.namelist()), "the pickle is that of torch"


def test_a_tensor_of_more_than_4_gib_has_numbers_of_8_bytes(tmp_path: Path) -> None:
    numel = (1 << 32) + 5
    head, tail = head_of(torch.int8, (numel,)), tail_of(torch.int8, (numel,), 7)
    with open(tmp_path / "large", "wb") as file:  # with a hole in place of the data
        file.write(head)
        file.seek(numel, 1)
        file.write(tail)
    entry = zipfile.ZipFile(tmp_path / "large").infolist()[-1]
    assert (entry.filename, entry.file_size, entry.CRC) == ("archive/data/0", numel, 7)
    assert torch.load(tmp_path / "large", mmap=True, weights_only=True).shape == (numel,)


def test_checksums_of_two_runs_join() -> None:
    draw = random.Random(0)
    for _ in range(100):
        first, second = draw.randbytes(draw.randrange(50)), draw.randbytes(draw.randrange(3000))
        joined = joined_checksum(zlib.crc32(first), zlib.crc32(second), len(second))
        assert joined == zlib.crc32(first + second)
