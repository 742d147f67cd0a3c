"""The ``.metadata`` of ``torch.distributed.checkpoint`` (DCP), read without running code from it.

A pickle may call any function. This reader looks up only dtypes, makes plain records of DCP's
metadata, and rejects every other name.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from funcshard._utils import file_data
from funcshard.plan import Box

METADATA = ".metadata"

# Where torch has the classes of the metadata, and had some of them before.
_RECORDS = re.compile(
    r"torch\.distributed\.(checkpoint|_shard\.sharded_tensor)\.metadata\."
    r"(BytesStorageMetadata|ChunkStorageMetadata|Metadata|MetadataIndex|StorageMeta|TensorProperties"
    r"|TensorStorageMetadata|_?MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.filesystem\._StorageInfo|torch\.serialization\._get_layout"
    r"|pathlib(\._local)?\.(Posix|Windows)Path"
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor in a file.

    Attributes:
        offset: index of the first byte in the file.
    """

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a DCP checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


def read_metadata(data: bytes, path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a DCP checkpoint by name.

    Raises:
        ValueError: the file is damaged, names something else, or says that tensors were
            transformed.
    """
    try:
        _check_memo(data)
        # Note: the objects are records with the attributes that the file gives, so each is checked.
        metadata = _Unpickler(io.BytesIO(data)).load()
        storage_infos = {
            (index.fqn, _offset_of(index)): info for index, info in metadata.storage_data.items()
        }
        return {
            file_data.text("the name of a tensor", name): _stored_tensor(
                name, stored, storage_infos
            )
            for name, stored in metadata.state_dict_metadata.items()
            if hasattr(stored, "chunks")  # the others are pickles that hold no tensor
        }
    except Exception as error:  # of any kind: the reader of pickles raises what it meets
        raise ValueError(
            f"{path / METADATA} is damaged, or is not the metadata of torch.distributed.checkpoint: "
            f"{error}"
        ) from None


def _check_memo(data: bytes) -> None:
    """Raise ``ValueError`` if a pickle counts more objects than it has bytes."""
    # Note: Python's reader takes memory for as many objects as the largest number, up to 64 GiB. A
    # changed byte makes a large number of a small one.
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and (argument or 0) > len(data):
            raise ValueError(f"it counts {argument} objects in {len(data)} bytes")


def _stored_tensor(name: str, stored: Any, storage: dict[Any, Any]) -> StoredTensor:
    shape, dtype = file_data.numbers("size", list(stored.size)), stored.properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the dtype of {name!r} must be one of torch; found {dtype!r}")
    chunks = tuple(_chunk(name, chunk, storage) for chunk in stored.chunks)
    _check_boxes(name, shape, [chunk.box for chunk in chunks])
    # Note: chunks inside the tensor that do not overlap, and are as many elements, cover it.
    held_numel, numel = sum(chunk.box.numel for chunk in chunks), math.prod(shape)
    if held_numel != numel:
        raise ValueError(
            f"the chunks of {name!r} must have its {numel} elements; found {held_numel}"
        )
    return StoredTensor(shape, dtype, chunks)


def _offset_of(index: Any) -> tuple[int, ...] | None:
    """Return where a chunk begins; ``None`` for a whole tensor."""
    offset = getattr(index, "offset", None)
    return None if offset is None else tuple(offset)


def _chunk(name: str, chunk: Any, storage: dict[Any, Any]) -> Chunk:
    offsets, sizes = (
        file_data.numbers(key, list(getattr(chunk, key))) for key in ("offsets", "sizes")
    )
    # Note: a tensor that was stored as a whole has no offset in its key.
    storage_info = storage.get((name, offsets), storage.get((name, None)))
    if storage_info is None:
        raise ValueError(f"it does not say where the part of {name!r} at {offsets} lies")
    if transforms := getattr(storage_info, "transform_descriptors", None):
        raise ValueError(
            f"it holds tensors that were transformed by {transforms}: load them with "
            "torch.distributed.checkpoint.load, and pass the state dict to from_state_dict"
        )
    file_name = file_data.own_name(f"the file of {name!r}", storage_info.relative_path)
    offset, length = (
        file_data.whole(f"the {key} of {name!r}", getattr(storage_info, key))
        for key in ("offset", "length")
    )
    return Chunk(Box(offsets, sizes), file_name, offset, length)


def _check_boxes(name: str, size: tuple[int, ...], chunks: Sequence[Box]) -> None:
    """Raise ``ValueError`` unless boxes lie inside of a tensor and don't overlap."""
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
    sweep_dim = max(range(len(size)), key=lambda dim: len({box.offsets[dim] for box in chunks}))
    open_boxes: list[Box] = []  # the boxes that end behind the beginning of the next one
    for box in sorted(chunks, key=lambda box: box.offsets[sweep_dim]):
        open_boxes = [
            other_box
            for other_box in open_boxes
            if other_box.offsets[sweep_dim] + other_box.sizes[sweep_dim] > box.offsets[sweep_dim]
        ]
        if any(box.overlap(other_box) for other_box in open_boxes):
            raise ValueError(f"the parts of {name!r} must not overlap; found two at {box.offsets}")
        open_boxes.append(box)


class _Record:
    """An object of DCP's metadata: its attributes, or ``state`` for a tuple."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        # Note: dataclasses pickle a dictionary, and TensorProperties a tuple.
        vars(self).update(state if isinstance(state, dict) else {"state": state})


def _member(record_type: Any, name: str) -> _Record:
    """Return a record of a member of an enumeration, which Python before 3.11.4 pickles so."""
    if not (isinstance(record_type, type) and issubclass(record_type, _Record)):
        raise ValueError(f"it asks for {name!r} of a {type(record_type).__name__}")
    return record_type()


_BUILTIN = {"torch.Size": tuple, "collections.OrderedDict": dict, "builtins.getattr": _member}


class _Unpickler(pickle.Unpickler):
    """Reads a pickle that names only DCP's metadata and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        # Why vars: getattr could import a submodule.
        of_torch = vars(torch).get(name) if module == "torch" else None
        if isinstance(of_torch, torch.dtype):
            return of_torch
        if _RECORDS.fullmatch(full_name):
            # Note: a new class each time, because a pickle can set attributes of a class too.
            return type(name, (_Record,), {})
        if full_name in _BUILTIN:
            return _BUILTIN[full_name]
        raise ValueError(
            f"it names {full_name}, and a pickle could run that; nothing of it was run. If you "
            "trust the file, load it with torch.distributed.checkpoint.load, and pass the state "
            "dict to from_state_dict"
        )
