"""Tensors on disk, in the files of ``torch.distributed.checkpoint`` (DCP).

Each rank writes one file with the slices that it stores, and reads the boxes that it needs. DCP
stores boxes: an offset and a size in each dimension. A slice of a raveled tensor consists of a few
of them: part of a row, whole rows, part of a row. So any program that uses DCP can load the files.

Why our own index: DCP's ``.metadata`` is a pickle, for which torch has no safe reader. It is
written for other programs, and never read here. Our index says where each box lies, with its
checksum. The reader compares the checksums first, and then reads the tensors with
``weights_only=True``.
"""

from __future__ import annotations

import math
import os
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from funcshard._utils import dcp_storage_info
from funcshard.checkpoint.metadata import TensorMetadata, TensorSlice, local_axes, metadata_of
from funcshard.checkpoint.read_items import ReadBox, ReadItem
from funcshard.plan import Box, boxes, dtype_of, position_of, rank_at, slice_offsets

# Why torch.distributed.checkpoint is imported inside functions: importing it takes a second, which
# only a process that saves or restores should spend.

__all__ = ["Region", "check_region", "read_slices", "write_metadata", "write_slices"]


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


def write_slices(
    folder: Path, rank: int, slices: Sequence[TensorSlice], tensors: Mapping[str, TensorMetadata]
) -> list[Region]:
    """Write one rank's slices into a file of its own, sync it to the disk, and return its regions.

    Raises:
        OSError: the file cannot be written.
    """
    from torch.distributed.checkpoint import FileSystemWriter, metadata, planner

    by_box: dict[tuple[str, tuple[int, ...]], tuple[int, torch.Tensor]] = {}
    writes = []
    for part in slices:
        stored, begin = metadata_of(part.name, tensors), part.begin
        for offsets, sizes in boxes(stored.shape, begin, begin + part.tensor.numel()):
            low = begin - part.begin
            by_box[part.name, offsets] = (begin, part.tensor[low : low + math.prod(sizes)].view(sizes))
            begin += math.prod(sizes)
            chunk = metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            data = planner.TensorWriteData(chunk, _properties(stored), torch.Size(stored.shape))
            index = metadata.MetadataIndex(part.name, offsets)
            writes.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data))
    writer = FileSystemWriter(folder, sync_files=True)
    writer.set_up_storage_writer(False, rank=rank, use_collectives=False)
    answers: Any = _PlannerAnswers(resolve_data=lambda write: by_box[write.index.fqn, tuple(write.index.offset)][1])
    try:
        results = writer.write_data(writer.prepare_local_plan(planner.SavePlan(writes)), answers).value()
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
        raise OSError(f"cannot write {folder / f'__{rank}_0.distcp'}: {_cause(error)}") from error
    regions = []
    for result in results:
        name, offsets, where = result.index.fqn, tuple(result.index.offset or ()), result.storage_data
        begin, tensor = by_box[name, offsets]
        region = Region(name, begin, offsets, tuple(tensor.shape), where.relative_path, where.offset, where.length, 0)
        regions.append(replace(region, checksum=_checksum(folder, region)))
    return regions


def write_metadata(
    folder: Path, regions: Sequence[Region], tensors: Mapping[str, TensorMetadata], mesh_axes: Mapping[str, int]
) -> None:
    """Write the ``.metadata`` in which DCP looks up the boxes.

    Slices of one whole tensor are boxes of it there, so other programs find whole tensors.
    """
    from torch.distributed.checkpoint import FileSystemWriter, metadata
    from torch.distributed.checkpoint.storage import WriteResult

    # Why tensors without elements are listed: they have no box, but a program that loads one looks
    # its name up.
    chunks: dict[str, list[Any]] = {name: [] for name, stored in tensors.items() if not stored.numel}
    known = {name: stored for name, stored in tensors.items() if not stored.numel}
    results = []
    storage_info = dcp_storage_info()
    for r in regions:
        stored = metadata_of(r.name, tensors)
        name, origin = _in_whole(r.name, stored, mesh_axes)
        offsets = Box(r.offsets, r.sizes).moved(origin).offsets
        known[name] = stored
        chunks.setdefault(name, []).append(metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(r.sizes)))
        where = storage_info(r.file, r.offset, r.length)
        results.append(WriteResult(metadata.MetadataIndex(name, offsets), r.length, where))
    listed: dict[str, Any] = {}
    for name, found in chunks.items():
        stored = known[name]
        listed[name] = metadata.TensorStorageMetadata(_properties(stored), torch.Size(stored.whole_shape), found)
    FileSystemWriter(folder, sync_files=True).finish(metadata.Metadata(listed), [results])


def _in_whole(name: str, stored: TensorMetadata, mesh_axes: Mapping[str, int]) -> tuple[str, tuple[int, ...]]:
    """Return the name of the whole tensor that a stored one is a slice of, and where it begins."""
    if not stored.cuts:
        return name, tuple(0 for _ in stored.shape)
    first, _, number = name.rpartition("@")
    position = position_of(int(number), {axis: mesh_axes[axis] for axis in local_axes(stored.kind)})
    own = {axis: mesh_axes[axis] for axis in stored.own_axes}
    return f"{first}@{rank_at(position, own)}" if own else first, slice_offsets(stored.shape, stored.cuts, position)


def read_slices(folder: Path, reads: Sequence[ReadItem | ReadBox], regions: Mapping[str, Sequence[Region]]) -> None:
    """Fill the tensors of ``reads`` from the boxes that hold their elements; read no other box.

    Raises:
        ValueError: a file is damaged, or the index lacks some of the elements.
    """
    from torch.distributed.checkpoint import FileSystemReader, metadata, planner

    needed = _regions_needed(folder, reads, regions)
    for region in needed:
        check_region(folder, region)
    by_index = {metadata.MetadataIndex(r.name, r.offsets): r for r in needed}
    storage_info = dcp_storage_info()
    info = {index: storage_info(r.file, r.offset, r.length) for index, r in by_index.items()}

    def resolve(read: Any) -> torch.Tensor:
        return torch.empty(read.lengths, dtype=needed[by_index[read.storage_index]][0].out.dtype)

    def commit(read: Any, tensor: torch.Tensor) -> None:
        region = by_index[read.storage_index]
        for item in needed[region]:
            item.copy_from(region.begin, tensor.reshape(-1))

    answers: Any = _PlannerAnswers(resolve_tensor=resolve, commit_tensor=commit)
    by_file: dict[str, list[Any]] = {}
    for index, r in by_index.items():
        zeros = torch.Size([0] * len(r.sizes))
        read = planner.ReadItem(planner.LoadItemType.TENSOR, index, zeros, index, zeros, torch.Size(r.sizes))
        by_file.setdefault(r.file, []).append(read)
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata.Metadata({}, storage_data=info), False)
    for file in sorted(by_file):
        try:
            reader.read_data(planner.LoadPlan(by_file[file]), answers)
        except (pickle.UnpicklingError, RuntimeError, AssertionError) as error:
            why = str(error).splitlines()[0]
            raise ValueError(f"{folder / file} holds other data than the tensors that were saved: {why}") from error


def check_region(folder: Path, region: Region) -> None:
    """Raise ``ValueError`` unless the bytes of a region have the checksum that was saved."""
    if _checksum(folder, region) != region.checksum:
        raise ValueError(
            f"{folder / region.file} is damaged: the bytes of {region.name!r} at {region.offset} are not those that were "
            f"saved; restore another checkpoint"
        )


def _regions_needed(
    folder: Path, reads: Sequence[ReadItem | ReadBox], regions: Mapping[str, Sequence[Region]]
) -> dict[Region, list[ReadItem | ReadBox]]:
    """Return each region that has elements of some of ``reads``, with those items."""
    needed: dict[Region, list[ReadItem | ReadBox]] = {}
    for item in reads:
        found = 0
        for region in regions.get(item.name, ()):
            if overlap := item.overlap(region.begin, region.numel):
                needed.setdefault(region, []).append(item)
                found += overlap
        if found != item.out.numel():
            raise ValueError(f"{folder} holds {found} of {item.out.numel()} needed elements of {item.name!r}")
    return needed


class _PlannerAnswers:
    """The methods of a DCP planner that a DCP storage calls, as plain functions."""

    def __init__(self, resolve_data: Any = None, resolve_tensor: Any = None, commit_tensor: Any = None) -> None:
        self.resolve_data, self.resolve_tensor, self.commit_tensor = resolve_data, resolve_tensor, commit_tensor


def _properties(stored: TensorMetadata) -> Any:
    from torch.distributed.checkpoint.metadata import TensorProperties

    return TensorProperties(dtype_of(stored.dtype))


def _checksum(folder: Path, region: Region) -> int:
    with open(folder / region.file, "rb") as file:
        file.seek(region.offset)
        return zlib.crc32(file.read(region.length))


def _cause(error: BaseException) -> str:
    """Return the operating system's message if there is one, else the first line of the error's."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return os.strerror(error.errno)
        if error.__context__ is None:
            break
        error = error.__context__
    return str(error).splitlines()[0]
