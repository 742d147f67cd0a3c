"""The two files of each rank in a checkpoint: its tensors, and their table.

The table has the place and the checksums of each tensor, and the rank's own values. It appears when
the tensors are on the disk, which tells rank 0 that this rank is done. Every text file has two
lines; the first has the checksum of the second.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch

from funcshard._utils import file_data
from funcshard._utils.codec import decode, encode
from funcshard._utils.regular_files import open_regular, read_regular, regular_size
from funcshard._utils.tensors import byte_memory, byte_view
from funcshard.checkpoint.stored_state import FlatState, Stored, Tensors

T = TypeVar("T")

FORMAT = "funcshard.checkpoint/3"
INDEX = "index.json"

# Bytes that have one checksum: they are summed up while they are still in the processor's cache.
CHECKED = 512 << 10

_LARGEST = (
    4 << 30
)  # bytes of a text file; the index of a million leaves has some hundred MiB
_WRITTEN_TOGETHER = 8  # blocks
_MOST_FILES, _MOST_BLOCKS = 32, 8  # that a reader has open, and in memory

# The dtypes that safetensors files can hold, by their names there.
CODES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu, "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip
CODE_OF = {dtype: code for code, dtype in CODES.items()}


class Place(NamedTuple):
    """Where a tensor lies in a rank's file.

    Attributes:
        checksums: CRC-32 of every ``CHECKED`` bytes.
    """

    offset: int
    nbytes: int
    checksums: tuple[int, ...]


_NOWHERE = Place(0, 0, ())


class Header(NamedTuple):
    """A tensor in the header of a safetensors file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def headers_of(tensors: Mapping[str, torch.Tensor]) -> list[Header]:
    """Return the entries of tensors by name."""
    return [
        Header(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    ]


def header_bytes(entries: Iterable[Header], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file before its tensors."""
    header_data: dict[str, Any] = {"__metadata__": metadata}
    end_byte = 0
    for entry in entries:
        shape = list(entry.shape)
        if (
            entry.dtype == torch.float4_e2m1fn_x2
        ):  # the numbers of four bits count one by one
            shape[-1] *= 2
        begin_byte, end_byte = end_byte, end_byte + entry.nbytes
        header_data[entry.name] = {
            "dtype": CODE_OF[entry.dtype], "shape": shape, "data_offsets": [begin_byte, end_byte]
        }  # fmt: skip
    header_text = json.dumps(header_data, separators=(",", ":")).encode()
    header_text += b" " * (
        -len(header_text) % 8
    )  # the tensors begin at a multiple of 8 bytes
    return len(header_text).to_bytes(8, "little") + header_text


@dataclass(frozen=True, slots=True)
class RankTable:
    """The table of one rank.

    Attributes:
        save: the token of the save.
        own: the trees of ``PerRank`` values.
        stored: the facts about the tensors in these values, by name.
        size: bytes of the file of tensors.
        header: SHA-256 of the bytes before the tensors.
    """

    save: str
    own: object
    stored: Mapping[str, Stored]
    size: int
    header: str
    places: Mapping[str, Place]


def tensor_file(save: str, rank: int) -> str:
    """Return the name of a rank's file of tensors; ``save`` is the token."""
    return f"{save}-{rank}.safetensors"


def table_file(save: str, rank: int) -> str:
    """Return the name of a rank's table."""
    return f"{save}-{rank}.json"


def files_of(save: str, world_size: int) -> list[str]:
    """Return the names of the files of all ranks."""
    return [
        name(save, rank) for rank in range(world_size) for name in (tensor_file, table_file)
    ]


# --- writing --------------------------------------------------------------------------------------


def write_rank(
    folder: Path, save: str, rank: int, flat: FlatState, tensors: Tensors
) -> None:
    """Write the files of one rank, and sync them to the disk."""
    # Why sorted: each tensor begins at a multiple of its dtype's size, as readers expect.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header_entries = [_header_of(name, tensors[name], flat.stored[name]) for name in names]
    header_start = header_bytes(header_entries, {"save": save, "rank": str(rank)})
    tensor_path, places = folder / tensor_file(save, rank), {}
    position = len(header_start)
    try:
        with open(tensor_path, "wb") as file:
            file.write(header_start)
            for name in names:
                # Note: checksums are of what was written, while it is in the processor's cache.
                checksums = _write_tensor(file, tensors[name])
                places[name] = Place(position, tensors[name].nbytes, checksums)
                position += tensors[name].nbytes
            sync_file(file)
            _leave_cache(file)
        own_facts = {
            name: stored for name, stored in flat.stored.items() if stored.kind == "rank"
        }
        header_digest = hashlib.sha256(header_start).hexdigest()
        rank_table = RankTable(
            save, flat.rank_specs, own_facts, position, header_digest, places
        )
        unfinished = folder / f"{save}-{rank}.part"
        write_text(unfinished, json.dumps(encode(rank_table), separators=(",", ":")))
        # Note: rank 0 takes the name for the news that the tensors are on the disk.
        # Note: publish syncs the folder, once for the names of all ranks.
        os.rename(unfinished, folder / table_file(save, rank))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise OSError(f"cannot write {tensor_path}: {reason}") from error


def _write_tensor(file: BinaryIO, tensor: torch.Tensor) -> tuple[int, ...]:
    """Write a tensor's elements, and return the CRC-32 of every ``CHECKED`` bytes."""
    checksums: list[int] = []
    for part in byte_view(tensor).split(CHECKED) if tensor.nbytes else ():
        cpu_part = part.cpu()
        checksums.append(zlib.crc32(byte_memory(cpu_part)))
        file.write(byte_memory(cpu_part))
        if len(checksums) % _WRITTEN_TOGETHER == 0:
            _leave_cache(file)
    return tuple(checksums)


def _leave_cache(file: BinaryIO) -> None:
    """Begin to write a file's pages to the disk, and give back those that are written."""
    # Why: the page cache takes memory from training, and the disk would be idle until the sync.
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_file(file: BinaryIO) -> None:
    """Flush an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def _header_of(name: str, tensor: torch.Tensor, stored: Stored) -> Header:
    """Return a tensor's entry: its bytes, if the format lacks its dtype."""
    # Note: the index has the dtype, so reading does not need it here.
    if tensor.dtype not in CODE_OF or (
        tensor.dtype == torch.float4_e2m1fn_x2 and not stored.shape
    ):
        return Header(name, torch.uint8, (tensor.nbytes,))
    return Header(name, tensor.dtype, stored.shape)


def write_text(path: Path, body: str) -> None:
    """Write JSON with its checksum, and sync it to the disk."""
    body_bytes = body.encode()
    head_text = json.dumps(
        {"format": FORMAT, "sha256": hashlib.sha256(body_bytes).hexdigest()}
    )
    with open(path, "wb") as file:
        file.write(head_text.encode() + b"\n" + body_bytes + b"\n")
        sync_file(file)


# --- reading --------------------------------------------------------------------------------------


def read_text(path: Path, hint: type[T]) -> T:
    """Return the data class of a text file; raise ``ValueError`` if it's damaged."""
    # Why no links: a checkpoint that was made to do harm could point at a device.
    file_bytes = read_regular(path, most=_LARGEST, links=False)
    try:
        head_bytes, body_text, *rest_lines = file_bytes.split(b"\n")
        # Note: JSON as save writes it has no line break.
        head_data = file_data.table(
            "its first line", file_data.parse(head_bytes), ("format",)
        )
    except ValueError as error:
        raise damaged(path, error) from None
    # Note: the format comes before the checksum, which another one may lack.
    if head_data["format"] != FORMAT:
        raise ValueError(
            f"{path} is of format {file_data.shown(head_data['format'])}; this version of funcshard "
            f"reads {FORMAT!r}: import_dcp(path, plan, mesh) reads the parameters of older ones"
        )
    if head_data.get("sha256") != hashlib.sha256(body_text).hexdigest() or rest_lines != [
        b""
    ]:
        raise ValueError(
            f"{path} is damaged: its checksum is not the one that was saved; restore another "
            "checkpoint"
        )
    try:
        return decode(hint, file_data.parse(body_text), path.stem)
    except ValueError as error:
        raise damaged(path, error) from None


def read_table(folder: Path, save: str, rank: int) -> RankTable:
    """Read a rank's table, and check the size of its file of tensors.

    Raise ``ValueError`` if one is damaged, missing or of another save.
    """
    path, tensor_path = folder / table_file(save, rank), folder / tensor_file(save, rank)
    try:
        rank_table, file_size = (
            read_text(path, RankTable),
            regular_size(tensor_path, links=False),
        )
    except FileNotFoundError as error:
        raise missing(Path(error.filename)) from None
    # Note: the index names the save; a table of another one is a mixed-up copy. Shards that are
    # missing are found when they are read, by the rank that needs them.
    if rank_table.save != save:
        raise damaged(path, "it belongs to another checkpoint")
    if file_size != rank_table.size:
        raise ValueError(
            f"{tensor_path} is damaged: it has {file_size} bytes and was saved with "
            f"{rank_table.size}; restore another checkpoint"
        )
    return rank_table


class RankReader:
    """Reads the tensors of a checkpoint's ranks; a context manager."""

    def __init__(self, folder: Path, save: str, table: Callable[[int], RankTable]) -> None:
        self.folder, self.save, self.table = folder, save, table
        self._files: dict[int, int] = {}
        self._blocks: dict[tuple[int, str, int], memoryview] = {}

    def __enter__(self) -> RankReader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._blocks.clear()

    def read(self, out: torch.Tensor, rank: int, name: str, begin: int) -> None:
        """Fill a 1-D tensor from a stored one, and compare checksums.

        Arguments:
            out: the tensor to fill, of the stored dtype.
            begin: index of the first element in the stored tensor.

        Raises:
            ValueError: the file is damaged, or doesn't hold these elements.
        """
        held_bytes = self.table(rank).places.get(name, _NOWHERE).nbytes
        target_bytes, begin_byte = byte_view(out), begin * out.element_size()
        if begin_byte + out.nbytes > held_bytes:
            raise ValueError(
                f"{self._path(rank)} must hold {out.nbytes} bytes of {name!r} at {begin_byte}; it holds "
                f"{held_bytes}: restore another checkpoint"
            )
        # Note: a block is checked as a whole, and all leaves in it are then copied from memory.
        while len(target_bytes):
            index, offset = divmod(begin_byte, CHECKED)
            block = self._block(rank, name, index)[offset : offset + len(target_bytes)]
            target_bytes[: len(block)].copy_(torch.frombuffer(block, dtype=torch.uint8))
            target_bytes, begin_byte = target_bytes[len(block) :], begin_byte + len(block)

    def checked(self, rank: int) -> Iterator[int]:
        """Check every byte of a rank's file, or raise ``ValueError``; yield their numbers."""
        rank_table = self.table(rank)
        offsets = [place.offset for place in rank_table.places.values()]
        header_view = memoryview(bytearray(min(offsets, default=rank_table.size)))
        self._pread(header_view, rank, 0)
        if hashlib.sha256(header_view).hexdigest() != rank_table.header:
            raise self._changed(rank, "its header")
        yield len(header_view)
        for name, place in rank_table.places.items():
            for index in range(len(place.checksums)):
                yield len(self._block(rank, name, index))

    def _block(self, rank: int, name: str, index: int) -> memoryview:
        """Return the bytes of a block, whose checksum is right."""
        block_key = (rank, name, index)
        if block_key not in self._blocks:
            # Note: a block may hold several leaves, which are read in turn. The oldest one goes,
            # because reads move forward. Its memory is used again, because new pages take longer
            # than a copy.
            if len(self._blocks) >= _MOST_BLOCKS:
                # Note: readers have copied the old block before they ask for another.
                memory = self._blocks.pop(next(iter(self._blocks))).obj
            else:
                memory = bytearray(CHECKED)
            place = self.table(rank).places[name]
            # Note: the last block of a tensor is shorter.
            block = memoryview(memory)[: place.nbytes - index * CHECKED]
            self._pread(block, rank, place.offset + index * CHECKED)
            if zlib.crc32(block) != place.checksums[index]:
                raise self._changed(rank, repr(name))
            self._blocks[block_key] = block
        return self._blocks[block_key]

    def _pread(self, memory: memoryview, rank: int, offset: int) -> None:
        # Note: a read may return less than it was asked for, as over NFS.
        while memory:
            read_bytes = os.preadv(self._open(rank), [memory], offset)
            if not read_bytes:
                raise self._changed(rank, "its end")
            memory, offset = memory[read_bytes:], offset + read_bytes

    def _open(self, rank: int) -> int:
        if rank not in self._files:
            if len(self._files) >= _MOST_FILES:
                # Note: a rank may read from thousands of others, and a process has few descriptors.
                os.close(self._files.pop(next(iter(self._files))))
            try:
                self._files[rank] = open_regular(self._path(rank), links=False)
            except FileNotFoundError:
                raise missing(self._path(rank)) from None
        return self._files[rank]

    def _path(self, rank: int) -> Path:
        return self.folder / tensor_file(self.save, rank)

    def _changed(self, rank: int, what: str) -> ValueError:
        return ValueError(
            f"{self._path(rank)} is damaged: the bytes of {what} are not those that were saved; "
            "restore another checkpoint"
        )


def damaged(path: Path, why: Exception | str = "") -> ValueError:
    """Return the error for a file that no version of the library wrote."""
    file_kind = "the index" if path.name == INDEX else "a file"
    reason = f" ({why})" if why else ""
    return ValueError(
        f"{path} is damaged: it is not {file_kind} of a checkpoint; restore another checkpoint{reason}"
    )


def missing(path: Path) -> ValueError:
    """Return the error for a missing file."""
    return ValueError(
        f"{path} is missing, so the checkpoint is not complete; restore another checkpoint"
    )
