"""The ``.metadata`` of ``torch.distributed.checkpoint`` (DCP), read without running code from it.

The file is a pickle, and a pickle may call any function of any module. This reader looks up no
function and no class. For each of the few names that DCP's metadata consists of it makes a plain
record, and it refuses every other name.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from funcshard._utils import file_data
from funcshard.plan import Box

METADATA = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata"
_MISSING = object()
_OLD = "torch.distributed._shard.sharded_tensor.metadata"  # where torch had some of them before


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor in a file.

    Attributes:
        box: the box of the whole tensor.
        file: name of the file.
        offset: index of the first byte in the file.
        length: number of bytes.
    """

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a DCP checkpoint.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        chunks: the boxes that it was saved in.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


def read_metadata(data: bytes, path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a DCP checkpoint by name.

    Arguments:
        data: the bytes of its ``.metadata``.
        path: the checkpoint's folder, for errors.

    Raises:
        ValueError: the file is damaged, names something other than DCP's metadata, or says that the
            tensors were transformed, as by a compression.
    """
    try:
        _check_numbers(data)
        root = _Reader(io.BytesIO(data)).load()
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path / METADATA} is not the metadata of torch.distributed.checkpoint: {error}"
        ) from None
    except Exception as error:  # of any kind: the reader of pickles raises what it meets
        raise ValueError(f"{path / METADATA} is damaged: {type(error).__name__}: {error}") from None
    try:
        return _tensors(root)
    except ValueError as error:
        raise ValueError(f"{path / METADATA} cannot be read: {error}") from None


def _check_numbers(data: bytes) -> None:
    """Raise ``ValueError`` if a pickle counts more objects or bytes than it has."""
    # Why: Python's reader takes memory for as many objects as the largest number, up to 64 GiB.
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and (argument or 0) > len(data):
            raise ValueError(f"it counts {argument} objects in {len(data)} bytes")


def _tensors(root: Any) -> dict[str, StoredTensor]:
    where: dict[str, dict[tuple[int, ...] | None, Any]] = {}
    for index, info in _dictionary(_field(root, "storage_data")).items():
        offset = None if _field(index, "offset", None) is None else _numbers(index, "offset")
        where.setdefault(file_data.text("fqn", _field(index, "fqn")), {})[offset] = info
    stored_tensors = {}
    for name, stored in _dictionary(_field(root, "state_dict_metadata")).items():
        if "chunks" not in _dictionary(stored):
            continue  # a value that is no tensor, in a pickle of its own
        size, dtype = _numbers(stored, "size"), _field(_field(stored, "properties"), "state")
        if not (type(dtype) is tuple and dtype and isinstance(dtype[0], torch.dtype)):
            raise ValueError(
                f"the dtype of {name!r} must be one of torch; found {file_data.shown(dtype)}"
            )
        file_data.whole(
            f"the number of elements of {name!r}", math.prod(size), 0, file_data.MOST // 16
        )
        listed = _field(stored, "chunks")
        chunks = [
            _chunk(name, chunk_info, where.get(name, {}))
            for chunk_info in (listed if type(listed) is list else [listed])
        ]
        _check_boxes(name, size, [chunk.box for chunk in chunks])
        stored_tensors[file_data.text("the name of a tensor", name)] = StoredTensor(
            size, dtype[0], tuple(chunks)
        )
    return stored_tensors


def _chunk(name: str, data: Any, infos: Mapping[tuple[int, ...] | None, Any]) -> Chunk:
    box = Box(_numbers(data, "offsets"), _numbers(data, "sizes"))
    info = infos.get(box.offsets, infos.get(None))
    if info is None:
        raise ValueError(f"it does not say where the part of {name!r} at {box.offsets} lies")
    if transforms := _field(info, "transform_descriptors", None):
        raise ValueError(
            f"it holds tensors that were transformed by {file_data.shown(transforms)}: load them "
            "with torch.distributed.checkpoint.load, and pass the state dict to from_state_dict"
        )
    file = file_data.own_name(f"the file of {name!r}", _field(info, "relative_path"))
    offset, length = (
        file_data.whole(f"the {key} of {name!r}", _field(info, key)) for key in ("offset", "length")
    )
    return Chunk(box, file, offset, length)


def _check_boxes(name: str, size: tuple[int, ...], chunks: Sequence[Box]) -> None:
    """Raise ``ValueError`` unless boxes lie inside of a tensor and do not overlap."""
    for box in chunks:
        if not len(box.offsets) == len(box.sizes) == len(size):
            raise ValueError(
                f"a part of {name!r} must have {len(size)} dimensions; found "
                f"{file_data.shown(box.offsets)}"
            )
        if any(begin + length > bound for begin, length, bound in zip(*box, size, strict=True)):
            raise ValueError(
                f"a part of {name!r} must lie inside of {size}; found {box.sizes} at {box.offsets}"
            )
    if not size:
        return
    # Why along the dim with most beginnings: along another one, each box would meet all others.
    along = max(range(len(size)), key=lambda dim: len({box.offsets[dim] for box in chunks}))
    reach: list[Box] = []  # the boxes that end behind the beginning of the next one
    for box in sorted(chunks, key=lambda box: box.offsets[along]):
        reach = [
            other_box
            for other_box in reach
            if other_box.offsets[along] + other_box.sizes[along] > box.offsets[along]
        ]
        if any(box.overlap(other_box) for other_box in reach):
            raise ValueError(f"the parts of {name!r} must not overlap; found two at {box.offsets}")
        reach.append(box)


def _dictionary(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"its records must have fields; found {file_data.shown(value)}")
    return value


def _field(record: Any, name: str, *otherwise: Any) -> Any:
    field_value = _dictionary(record).get(name, *(otherwise or (_MISSING,)))
    if field_value is _MISSING:
        raise ValueError(f"a record lacks the field {name!r}")
    return field_value


def _numbers(record: Any, name: str) -> tuple[int, ...]:
    field_numbers = _field(record, name)
    return file_data.numbers(
        name, list(field_numbers) if type(field_numbers) is tuple else field_numbers
    )


class _Record(dict[str, Any]):
    """The state of an object of DCP's metadata, as a dictionary."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # records are keys of the metadata's dictionaries

    def __setstate__(self, state: Any) -> None:
        self.update(state if isinstance(state, Mapping) else {"state": state})


class _Ignored:
    """An object that the reader does not need."""

    __slots__ = ()

    def __init__(self, *_: Any) -> None: ...

    # Why: a pickle could set attributes of this class otherwise.
    def __setstate__(self, state: Any) -> None: ...


_KNOWN: dict[tuple[str, str], type] = {
    **{
        (_METADATA, name): _Record
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
            "TensorStorageMetadata",
        )
    },
    (_OLD, "TensorProperties"): _Record,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    ("torch.serialization", "_get_layout"): _Ignored,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Ignored,
    (_OLD, "MEM_FORMAT_ENCODING"): _Ignored,
    **{(f"pathlib{room}", f"{path_kind}Path"): _Ignored for room in ("", "._local") for path_kind in ("Posix", "Windows")},
}  # fmt: skip


class _Reader(pickle.Unpickler):
    """Reads a pickle without looking up any name in a module, besides the dtypes of torch."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, and a pickle could run that; nothing of it was run. If you "
            "trust the file, load it with torch.distributed.checkpoint.load, and pass the state "
            "dict to from_state_dict"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to data outside of the file")
