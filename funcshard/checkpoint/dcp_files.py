"""Pieces on disk, in the files of ``torch.distributed.checkpoint``: each rank writes its own, and reads what it needs.

A piece, a run of a leaf's elements in flat order, is stored as the few boxes that such a run consists of, so that the
files and their ``.metadata`` are a checkpoint for anybody's ``torch.distributed.checkpoint.load``. That ``.metadata`` is a
pickle, and is never read here: where each box lies stands in our own index, with its checksum. Tensors are read with
``weights_only=True``, after their checksums have been compared.
"""

from __future__ import annotations

import functools
import math
import os
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from funcshard.checkpoint.flatten_state import Item, Piece
from funcshard.checkpoint.unflatten_state import Request
from funcshard.plan import dtype_of

__all__ = ["Region", "boxes", "check_region", "read_pieces", "write_metadata", "write_pieces"]

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes, dimension by dimension


@dataclass(frozen=True, slots=True)
class Region:
    """Where one box of a tensor lies.

    Attributes:
        name: the tensor's.
        begin: the box's first element, in the tensor's flat order; the others follow it there.
        offsets: where the box begins in each dimension.
        sizes: how long it is in each.
        file: name of the file.
        offset: first byte of it there.
        length: number of bytes.
        checksum: CRC-32 of them.
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


def boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Split the elements from ``begin`` to ``end`` of a tensor's flat order into boxes, in that order.

    Example:
        >>> boxes((3, 4), 2, 9)
        [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if begin >= end:
        return []
    if len(shape) <= 1:
        return [((begin,), (end - begin,))] if shape else [((), ())]
    below = math.prod(shape[1:])
    row, head = divmod(begin, below)
    last, tail = divmod(end, below)

    def within(row: int, low: int, high: int) -> list[Box]:
        return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes(shape[1:], low, high)]

    if row == last:
        return within(row, head, tail)
    first = within(row, head, below) if head else []
    row += bool(head)
    zeros = tuple(0 for _ in shape[1:])
    middle = [((row, *zeros), (last - row, *shape[1:]))] if row < last else []
    return [*first, *middle, *within(last, 0, tail)]


def write_pieces(folder: Path, rank: int, pieces: Sequence[Piece], items: Mapping[str, Item]) -> list[Region]:
    """Write one rank's pieces into a file of its own, synced to the disk, and return where they are."""
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    m = _metadata_types()
    cut: dict[tuple[str, tuple[int, ...]], tuple[int, torch.Tensor]] = {}
    writes = []
    for piece in pieces:
        item, begin = items[piece.name], piece.begin
        for offsets, sizes in boxes(item.shape, begin, begin + piece.tensor.numel()):
            low = begin - piece.begin
            begin += math.prod(sizes)
            cut[piece.name, offsets] = (piece.begin + low, piece.tensor[low : low + math.prod(sizes)].view(sizes))
            chunk = m.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            data = TensorWriteData(chunk, m.TensorProperties(dtype_of(item.dtype)), torch.Size(item.shape))
            writes.append(WriteItem(m.MetadataIndex(piece.name, offsets), WriteItemType.SHARD, tensor_data=data))
    writer = FileSystemWriter(folder, sync_files=True)
    writer.set_up_storage_writer(False, rank=rank, use_collectives=False)
    planner: Any = _Answers(lambda write: cut[write.index.fqn, tuple(write.index.offset)][1])
    try:
        results = writer.write_data(writer.prepare_local_plan(SavePlan(writes)), planner).value()
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
        raise OSError(f"cannot write {_file_of(folder, rank)}: {_cause(error)}") from error
    regions = []
    for result in results:
        name, offsets, where = result.index.fqn, tuple(result.index.offset or ()), result.storage_data
        begin, tensor = cut[name, offsets]
        region = Region(name, begin, offsets, tuple(tensor.shape), where.relative_path, where.offset, where.length, 0)
        regions.append(_with_checksum(region, folder))
    return regions


def write_metadata(folder: Path, regions: Sequence[Region], items: Mapping[str, Item]) -> None:
    """Write the ``.metadata`` by which ``torch.distributed.checkpoint`` finds the boxes."""
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.storage import WriteResult

    m = _metadata_types()
    chunks: dict[str, list[Any]] = {}
    results = []
    for r in regions:
        chunks.setdefault(r.name, []).append(m.ChunkStorageMetadata(torch.Size(r.offsets), torch.Size(r.sizes)))
        where = m.StorageInfo(r.file, r.offset, r.length)
        results.append(WriteResult(m.MetadataIndex(r.name, r.offsets), r.length, where))
    tensors = {}
    for name, found in chunks.items():
        item = items[name] if name in items else items[name.rpartition("@")[0]]
        tensors[name] = m.TensorStorageMetadata(m.TensorProperties(dtype_of(item.dtype)), torch.Size(item.shape), found)
    for name, item in items.items():
        if not item.numel:  # there is no box of it, but who loads it asks for its name
            tensors[name] = m.TensorStorageMetadata(m.TensorProperties(dtype_of(item.dtype)), torch.Size(item.shape), [])
    writer = FileSystemWriter(folder, sync_files=True)
    writer.finish(m.Metadata(tensors), [results])


def read_pieces(folder: Path, requests: Sequence[Request], regions: Mapping[str, Sequence[Region]]) -> None:
    """Fill the tensors of ``requests``, reading only the boxes that they touch.

    Raises:
        ValueError: a file is damaged, or the index has no such elements.
    """
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    m = _metadata_types()
    needed: dict[Region, list[Request]] = {}
    for request in requests:
        end, found = request.begin + request.out.numel(), 0
        for region in regions.get(request.name, ()):
            low, high = max(request.begin, region.begin), min(end, region.begin + region.numel)
            if low < high:
                needed.setdefault(region, []).append(request)
                found += high - low
        if found != request.out.numel():
            raise ValueError(f"{folder} holds {found} of {request.out.numel()} needed elements of {request.name!r}")
    for region in needed:
        check_region(folder, region)
    places = {m.MetadataIndex(r.name, r.offsets): r for r in needed}
    info = {index: m.StorageInfo(r.file, r.offset, r.length) for index, r in places.items()}

    def commit(read: Any, tensor: torch.Tensor) -> None:
        region = places[read.storage_index]
        for request in needed[region]:
            low = max(request.begin, region.begin)
            high = min(request.begin + request.out.numel(), region.begin + region.numel)
            part = tensor.reshape(-1)[low - region.begin : high - region.begin]
            with torch.no_grad():
                request.out[low - request.begin : high - request.begin].copy_(part)

    dtypes = {region: needed[region][0].out.dtype for region in needed}
    planner: Any = _Answers(
        resolve_tensor=lambda read: torch.empty(read.lengths, dtype=dtypes[places[read.storage_index]]), commit_tensor=commit
    )
    reads = [
        ReadItem(
            LoadItemType.TENSOR, i, torch.Size([0] * len(r.sizes)), i, torch.Size([0] * len(r.sizes)), torch.Size(r.sizes)
        )
        for i, r in places.items()
    ]
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(m.Metadata({}, storage_data=info), False)
    for file in sorted({region.file for region in needed}):
        part = [read for read in reads if places[read.storage_index].file == file]
        try:
            reader.read_data(LoadPlan(part), planner)
        except (pickle.UnpicklingError, RuntimeError, AssertionError) as error:
            why = str(error).splitlines()[0]
            raise ValueError(f"{folder / file} holds something else than tensors as they were saved: {why}") from error


def check_region(folder: Path, region: Region) -> None:
    """Raise ``ValueError`` unless the bytes of a region are what was written."""
    if _with_checksum(region, folder).checksum != region.checksum:
        raise ValueError(
            f"{folder / region.file} is damaged: the bytes of {region.name!r} at {region.offset} are not those that were "
            f"saved; restore another checkpoint"
        )


def _with_checksum(region: Region, folder: Path) -> Region:
    with open(folder / region.file, "rb") as file:
        file.seek(region.offset)
        checksum = zlib.crc32(file.read(region.length))
    name, begin, offsets, sizes = region.name, region.begin, region.offsets, region.sizes
    return Region(name, begin, offsets, sizes, region.file, region.offset, region.length, checksum)


class _Answers:
    """The part of a planner of ``torch.distributed.checkpoint`` that its storages ask, as plain functions."""

    def __init__(self, resolve_data: Any = None, resolve_tensor: Any = None, commit_tensor: Any = None) -> None:
        self.resolve_data, self.resolve_tensor, self.commit_tensor = resolve_data, resolve_tensor, commit_tensor


@functools.cache
def _metadata_types() -> Any:
    # importing torch.distributed.checkpoint takes a second, so only who saves or restores does
    from torch.distributed.checkpoint import filesystem, metadata

    class Types:
        ChunkStorageMetadata = metadata.ChunkStorageMetadata
        Metadata = metadata.Metadata
        MetadataIndex = metadata.MetadataIndex
        StorageInfo = filesystem._StorageInfo
        TensorProperties = metadata.TensorProperties
        TensorStorageMetadata = metadata.TensorStorageMetadata

    return Types


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"__{rank}_0.distcp"


def _cause(error: BaseException) -> str:
    """What the operating system said, where it is known."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return os.strerror(error.errno)
        if error.__context__ is None:
            break
        error = error.__context__
    return str(error).splitlines()[0]
