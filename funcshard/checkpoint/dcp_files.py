"""Tensors on disk, in the files of ``torch.distributed.checkpoint`` (DCP).

Each rank writes one file with the slices that it stores, and reads the boxes that it needs. DCP
stores boxes: an offset and a size in each dimension. A slice of a raveled tensor consists of a few
of them: part of a row, whole rows, part of a row. So any program that uses DCP can load the files.

Why our own index: DCP's ``.metadata`` is a pickle, for which torch has no safe reader. It is
written for other programs, and never read here. Our index says where each box lies, with its
checksum. The reader copies a tensor's bytes to their place and compares the checksum on the way.
Archives of another form than ours, such as those of ``torch.save``, are read with
``weights_only=True`` after the comparison.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from funcshard._utils import byte_view, dcp_storage_info
from funcshard.checkpoint.archives import head_of, joined_checksum, read_archive, tail_of
from funcshard.checkpoint.block_files import HOT, BlockWriter, read_ranges
from funcshard.checkpoint.dcp_metadata import METADATA
from funcshard.checkpoint.metadata import TensorMetadata, TensorSlice, local_axes, metadata_of
from funcshard.checkpoint.read_items import ReadBox, ReadItem
from funcshard.plan import Box, boxes, dtype_of, position_of, rank_at, slice_offsets

# Why torch.distributed.checkpoint is imported inside functions: importing it takes a second, which
# only the process that writes .metadata should spend.


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes of a file that hold one box of a tensor.

    Attributes:
        name: the stored tensor's name.
        begin: index of the box's first element in the raveled tensor; the box's other elements
            follow it there.
        offsets: index of the box's first element in each dimension.
        sizes: length of the box in each dimension.
        file: name of the file.
        offset: index of the first byte in the file.
        length: number of bytes.
        checksum: CRC-32 of the bytes.
    """

    name: str
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int
    checksum: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Region:
        """Return a region of the index of a checkpoint of the first versions."""
        name, begin, offsets, sizes, *further_fields = fields
        return cls(name, begin, tuple(offsets), tuple(sizes), *further_fields)


def write_slices(
    folder: Path, rank: int, slices: Sequence[TensorSlice], tensors: Mapping[str, TensorMetadata]
) -> list[Region]:
    """Write one rank's slices into its own file, sync it to the disk, and return its regions.

    Raises:
        OSError: the file cannot be written.
    """
    file, regions = folder / f"__{rank}_0.distcp", []
    try:
        with BlockWriter(file) as out:
            for part in slices:
                stored, begin = metadata_of(part.name, tensors), part.begin
                for offsets, sizes in boxes(stored.shape, begin, begin + part.tensor.numel()):
                    end = begin + math.prod(sizes)
                    start, data = out.position, part.tensor[begin - part.begin : end - part.begin]
                    checksum = _write_archive(out, sizes, data)
                    length = out.position - start
                    regions.append(
                        Region(part.name, begin, offsets, sizes, file.name, start, length, checksum)
                    )
                    begin = end
    except OSError as error:
        raise OSError(
            f"cannot write {file}: {os.strerror(error.errno) if error.errno else error}"
        ) from error
    return regions


def _write_archive(out: BlockWriter, sizes: tuple[int, ...], data: torch.Tensor) -> int:
    """Write a tensor of ``sizes`` as ``torch.save`` does, and return the archive's CRC-32."""
    head = head_of(data.dtype, sizes)
    out.write(head)
    checksum = out.write_tensor(data)
    tail = tail_of(data.dtype, sizes, checksum)
    out.write(tail)
    return zlib.crc32(
        tail, joined_checksum(zlib.crc32(head), checksum, data.numel() * data.element_size())
    )


def write_metadata(
    folder: Path,
    regions: Sequence[Region],
    tensors: Mapping[str, TensorMetadata],
    mesh_axes: Mapping[str, int],
) -> None:
    """Write the ``.metadata`` in which DCP looks up the boxes.

    Slices of one whole tensor are boxes of it there, so other programs find whole tensors.
    """
    from torch.distributed.checkpoint import FileSystemWriter, metadata

    # Why tensors without elements are listed: they have no box, but a program that loads one looks
    # its name up.
    by_name: dict[str, list[Region]] = {
        name: [] for name, stored in tensors.items() if not stored.numel
    }
    for region in regions:
        by_name.setdefault(
            _in_whole(region.name, metadata_of(region.name, tensors), mesh_axes)[0], []
        ).append(region)
    storage_info = dcp_storage_info()

    def boxes_of(name: str) -> Iterator[tuple[Region, torch.Size]]:
        for region in by_name[name]:
            origin = _in_whole(region.name, metadata_of(region.name, tensors), mesh_axes)[1]
            yield region, torch.Size(Box(region.offsets, region.sizes).moved(origin).offsets)

    def described() -> Iterator[tuple[Any, Any]]:
        for name, named_items in by_name.items():
            stored = metadata_of(named_items[0].name if named_items else name, tensors)
            chunks = [
                metadata.ChunkStorageMetadata(at, torch.Size(region.sizes))
                for region, at in boxes_of(name)
            ]
            yield (
                name,
                metadata.TensorStorageMetadata(
                    _properties(stored), torch.Size(stored.whole_shape), chunks
                ),
            )

    def placed() -> Iterator[tuple[Any, Any]]:
        for name in by_name:
            for region, at in boxes_of(name):
                where = storage_info(region.file, region.offset, region.length)
                yield metadata.MetadataIndex(name, at), where

    dcp_metadata = metadata.Metadata({})
    # Why torch's writer: it sets the fields that depend on torch's version.
    FileSystemWriter(folder).finish(dcp_metadata, [[]])
    fields = {
        name: value
        for name, value in vars(dcp_metadata).items()
        if name not in ("state_dict_metadata", "storage_data")
    }
    unfinished = folder / f"{METADATA}.tmp"
    with open(unfinished, "wb") as file:
        # The pickle of the object Metadata, made part by part. Why: pickling 100,000 boxes at once,
        # and collecting garbage among that many objects, stops every other thread for a second.
        file.write(
            pickle.PROTO
            + b"\x02"
            + _part(metadata.Metadata)
            + pickle.EMPTY_TUPLE
            + pickle.NEWOBJ
            + pickle.EMPTY_DICT
        )
        for field, pairs in (("state_dict_metadata", described()), ("storage_data", placed())):
            file.write(_part(field) + pickle.EMPTY_DICT)
            for key, value in pairs:
                file.write(_part(key) + _part(value) + pickle.SETITEM)
            file.write(pickle.SETITEM)
        for field, value in fields.items():
            file.write(_part(field) + _part(value) + pickle.SETITEM)
        file.write(pickle.BUILD + pickle.STOP)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, folder / METADATA)


def _part(value: Any) -> bytes:
    """Return the pickle of a part of an object, which may follow others."""
    return pickle.dumps(value, 2)[2:-1]


def _in_whole(
    name: str, stored: TensorMetadata, mesh_axes: Mapping[str, int]
) -> tuple[str, tuple[int, ...]]:
    """Return the name of the whole tensor that a stored one is a slice of, and where it begins."""
    if not stored.cuts:
        return name, tuple(0 for _ in stored.shape)
    first, _, rank_text = name.rpartition("@")
    position = position_of(
        int(rank_text), {axis: mesh_axes[axis] for axis in local_axes(stored.kind)}
    )
    own_sizes = {axis: mesh_axes[axis] for axis in stored.own_axes}
    return f"{first}@{rank_at(position, own_sizes)}" if own_sizes else first, slice_offsets(
        stored.shape, stored.cuts, position
    )


def read_slices(
    folder: Path, reads: Sequence[ReadItem | ReadBox], regions: Mapping[str, Sequence[Region]], *, ranks: int = 1,
    stored: int | None = None, at: int | None = None,
) -> None:  # fmt: skip
    """Fill the tensors of ``reads`` from the boxes that hold their elements; read no other box.

    Arguments:
        folder: the checkpoint's folder.
        reads: the elements to read.
        regions: the boxes of each stored tensor, as far as a read may need them.
        ranks: number of ranks that read.
        stored: bytes of all tensors of the checkpoint; by default those of ``regions``.
        at: descriptor of the folder, if it is open.

    Raises:
        ValueError: a file is damaged, or the index lacks some of the elements.
    """
    needed = _regions_needed(folder, reads, regions)
    # Why: ranks of one machine find what another rank has read in the page cache.
    stored = (
        sum(r.length for name_regions in regions.values() for r in name_regions)
        if stored is None
        else stored
    )
    alone = ranks * sum(r.length for r in needed) <= 1.5 * stored
    by_file: dict[str, list[Region]] = {}
    for region in sorted(needed, key=lambda region: (region.file, region.offset)):
        by_file.setdefault(region.file, []).append(region)
    for file, ordered in by_file.items():
        ranges = [(region.offset, region.offset + region.length) for region in ordered]
        stream = _Stream(read_ranges(folder / file, ranges, direct=alone, at=at))
        for region in ordered:
            try:
                good = _read_region(folder, region, needed[region], stream)
            except EOFError:
                good = False
            except FileNotFoundError:
                raise ValueError(
                    f"{folder / file} is missing, so the checkpoint is not complete; restore "
                    "another checkpoint"
                ) from None
            if not good:
                raise _damaged(folder, region)


class _Stream:
    """Consecutive bytes, taken from views of any sizes."""

    def __init__(self, views: Iterator[memoryview]) -> None:
        self.views, self.view = views, memoryview(b"")

    def chunks(self, size: int) -> Iterator[memoryview]:
        """Yield the next ``size`` bytes in pieces; a piece is valid until the next one."""
        while size:
            if not self.view:
                self.view = next(self.views)
            part = min(size, HOT)
            chunk_view, self.view = self.view[:part], self.view[part:]
            size -= len(chunk_view)
            yield chunk_view

    def take(self, size: int) -> bytes:
        return b"".join(bytes(chunk) for chunk in self.chunks(size))


def _read_region(
    folder: Path, region: Region, items: Sequence[ReadItem | ReadBox], stream: _Stream
) -> bool:
    """Read a box into the tensors of ``items``; return whether its checksum is the saved one."""
    dtype = items[0].out.dtype
    head, size = head_of(dtype, region.sizes), region.numel * dtype.itemsize
    chunk_bytes = stream.take(min(len(head), region.length))
    tail_bytes = region.length - len(head) - size
    if chunk_bytes != head or tail_bytes != len(
        tail_of(dtype, region.sizes, 0)
    ):  # torch.save wrote it
        return _read_archive(
            folder, region, items, chunk_bytes + stream.take(region.length - len(chunk_bytes))
        )
    target = _Target(region, items, dtype)
    checksum = 0
    for chunk in stream.chunks(size):
        checksum = zlib.crc32(chunk, checksum)
        target.add(chunk)
    tail = stream.take(tail_bytes)
    if zlib.crc32(tail, joined_checksum(zlib.crc32(head), checksum, size)) != region.checksum:
        return False
    if tail != tail_of(dtype, region.sizes, checksum):
        raise _other_data(folder, region, "its archive ends in another way")
    target.finish()
    return True


def _read_archive(
    folder: Path, region: Region, items: Sequence[ReadItem | ReadBox], archive: bytes
) -> bool:
    """Do the same from the bytes of an archive, through ``torch.load``."""
    if zlib.crc32(archive) != region.checksum:
        return False
    try:
        tensor = read_archive(io.BytesIO(archive), items[0].out.dtype, region.sizes)
    except ValueError as error:
        raise _other_data(folder, region, str(error)) from error
    for item in items:
        item.copy_from(region.begin, tensor.reshape(-1))
    return True


class _Target:
    """The tensors that the bytes of one box belong into."""

    def __init__(
        self, region: Region, items: Sequence[ReadItem | ReadBox], dtype: torch.dtype
    ) -> None:
        self.begin, self.items, self.done = region.begin, items, 0
        item = items[0]
        self.straight = len(items) == 1 and isinstance(item, ReadItem) and item.out.is_contiguous()
        if self.straight and isinstance(item, ReadItem):
            first, out = item.destination(region.begin, region.numel)
        else:  # the elements go to several places, or to boxes
            first, out = 0, torch.empty(region.numel, dtype=dtype, device="cpu")
        self.first, self.whole, self.out = first * dtype.itemsize, out, byte_view(out)

    def add(self, chunk: memoryview) -> None:
        """Copy the next bytes of the box."""
        low = max(self.done, self.first)
        high = min(self.done + len(chunk), self.first + self.out.numel())
        if low < high:
            bytes_ = torch.frombuffer(chunk, dtype=torch.uint8)[low - self.done : high - self.done]
            self.out[low - self.first : high - self.first].copy_(bytes_)
        self.done += len(chunk)

    def finish(self) -> None:
        """Copy the elements to their places, if they are not there yet."""
        for item in () if self.straight else self.items:
            item.copy_from(self.begin, self.whole)


def check_region(folder: Path, region: Region, at: int | None = None) -> None:
    """Raise ``ValueError`` unless the bytes of a region have the checksum that was saved."""
    checksum = 0
    try:
        for view in read_ranges(
            folder / region.file, [(region.offset, region.offset + region.length)], at=at
        ):
            checksum = zlib.crc32(view, checksum)
    except EOFError:
        raise _damaged(folder, region) from None
    if checksum != region.checksum:
        raise _damaged(folder, region)


def _damaged(folder: Path, region: Region) -> ValueError:
    return ValueError(
        f"{folder / region.file} is damaged: the bytes of {region.name!r} at {region.offset} are "
        "not those that were saved; restore another checkpoint"
    )


def _other_data(folder: Path, region: Region, why: str) -> ValueError:
    return ValueError(
        f"{folder / region.file} holds other data than the tensors that were saved: {why}"
    )


def _regions_needed(
    folder: Path, reads: Sequence[ReadItem | ReadBox], regions: Mapping[str, Sequence[Region]]
) -> dict[Region, list[ReadItem | ReadBox]]:
    """Return each region that has elements of some of ``reads``, with those items."""
    needed: dict[Region, list[ReadItem | ReadBox]] = {}
    for item in reads:
        needed_numel = 0
        for region in regions.get(item.name, ()):
            if overlap := item.overlap(region.begin, region.numel):
                needed.setdefault(region, []).append(item)
                needed_numel += overlap
        if needed_numel != item.out.numel():
            raise ValueError(
                f"{folder} holds {needed_numel} of {item.out.numel()} needed elements of {item.name!r}"
            )
    return needed


def _properties(stored: TensorMetadata) -> Any:
    from torch.distributed.checkpoint.metadata import TensorProperties

    return TensorProperties(dtype_of(stored.dtype))
