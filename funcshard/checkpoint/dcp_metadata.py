"""The ``.metadata`` of ``torch.distributed.checkpoint`` (DCP), read without running code from it.

The file is a pickle, and a pickle may call any function of any module. This reader knows the data
classes that DCP's metadata consists of, and rejects every other name.
"""

from __future__ import annotations

import io
import math
import pathlib
import pickle
import pickletools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from funcshard._utils import file_data
from funcshard.plan import Box

METADATA = ".metadata"

_KNOWN = re.compile(
    r"torch\.distributed\.(checkpoint|_shard\.sharded_tensor)\.metadata\."
    r"(BytesStorageMetadata|ChunkStorageMetadata|Metadata|MetadataIndex|StorageMeta|TensorProperties"
    r"|TensorStorageMetadata|_?MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.filesystem\._StorageInfo"
    r"|torch\.Size|torch\.serialization\._get_layout|collections\.OrderedDict"
)
_PATH = re.compile(r"pathlib(\._local)?\.((Posix|Windows)Path)")


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
        _check_memo(data)
        metadata = _Unpickler(io.BytesIO(data)).load()
        storage = {
            (i.fqn, i.offset and tuple(i.offset)): s for i, s in metadata.storage_data.items()
        }
        return {
            file_data.text("the name of a tensor", name): _stored_tensor(name, stored, storage)
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
    shape, dtype = file_data.numbers("size", list(stored.size)), stored.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the dtype of {name!r} must be one of torch; found {dtype!r}")
    chunks = tuple(_chunk(name, chunk, storage) for chunk in stored.chunks)
    held, numel = sum(chunk.box.numel for chunk in chunks), math.prod(shape)
    if held != numel:
        raise ValueError(f"the chunks of {name!r} must have its {numel} elements; found {held}")
    return StoredTensor(shape, dtype, chunks)


def _chunk(name: str, chunk: Any, storage: dict[Any, Any]) -> Chunk:
    offsets, sizes = (
        file_data.numbers(key, list(getattr(chunk, key))) for key in ("offsets", "sizes")
    )
    info = storage.get((name, offsets)) or storage[name, None]
    if transforms := getattr(info, "transform_descriptors", None):
        raise ValueError(
            f"it holds tensors that were transformed by {transforms}: load them with "
            "torch.distributed.checkpoint.load, and pass the state dict to from_state_dict"
        )
    file = file_data.own_name(f"the file of {name!r}", info.relative_path)
    offset, length = (
        file_data.whole(f"the {key} of {name!r}", getattr(info, key))
        for key in ("offset", "length")
    )
    return Chunk(Box(offsets, sizes), file, offset, length)


class _Unpickler(pickle.Unpickler):
    """Reads a pickle that names nothing but DCP's data classes, paths, and the dtypes of torch."""

    def find_class(self, module: str, name: str) -> Any:
        if of_path := _PATH.fullmatch(f"{module}.{name}"):
            return getattr(
                pathlib, f"Pure{of_path[2]}"
            )  # a path of any system, which opens nothing
        of_torch = getattr(torch, name, None) if module == "torch" else None
        if _KNOWN.fullmatch(f"{module}.{name}") or isinstance(of_torch, torch.dtype):
            return super().find_class(module, name)
        raise ValueError(
            f"it names {module}.{name}, and a pickle could run that; nothing of it was run. If you "
            "trust the file, load it with torch.distributed.checkpoint.load, and pass the state "
            "dict to from_state_dict"
        )
