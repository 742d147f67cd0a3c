"""The ``.metadata`` of ``torch.distributed.checkpoint`` (DCP), read without running code from it.

The file is a pickle, and a pickle may call any function of any module. This reader looks up no
function and no class. For each of the few names that DCP's metadata consists of it makes a plain
record, and it refuses every other name.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from funcshard.plan import Box

__all__ = ["METADATA", "Chunk", "StoredTensor", "read_metadata"]

METADATA = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata"
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
        root = _Reader(io.BytesIO(data)).load()
        return _tensors(root, path)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path / METADATA} is not the metadata of torch.distributed.checkpoint: {error}") from None
    except (AttributeError, EOFError, IndexError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path / METADATA} is damaged: {type(error).__name__}: {error}") from None


def _tensors(root: Any, path: Path) -> dict[str, StoredTensor]:
    where: dict[str, dict[tuple[int, ...] | None, Any]] = {}
    for index, info in root["storage_data"].items():
        where.setdefault(index["fqn"], {})[index.get("offset")] = info
    found = {}
    for name, stored in root["state_dict_metadata"].items():
        if "chunks" not in stored:
            continue  # a value that is no tensor, in a pickle of its own
        chunks = []
        for chunk in stored["chunks"]:
            infos = where[name]
            info = infos[chunk["offsets"]] if chunk["offsets"] in infos else infos[None]
            if info.get("transform_descriptors"):
                raise ValueError(
                    f"{path} holds tensors that were transformed by {list(info['transform_descriptors'])}: load them with "
                    f"torch.distributed.checkpoint.load, and pass the state dict to from_state_dict"
                )
            file = info["relative_path"]
            if Path(file).name != file:
                raise ValueError(f"{path / METADATA} names the file {file!r}, which is not in the checkpoint's own folder")
            box = Box(tuple(map(int, chunk["offsets"])), tuple(map(int, chunk["sizes"])))
            chunks.append(Chunk(box, file, int(info["offset"]), int(info["length"])))
        dtype = stored["properties"]["state"][0]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"the dtype of {name} is {dtype!r}")
        found[name] = StoredTensor(tuple(map(int, stored["size"])), dtype, tuple(chunks))
    return found


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
    **{(f"pathlib{room}", f"{kind}Path"): _Ignored for room in ("", "._local") for kind in ("Posix", "Windows")},
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
            f"it names {module}.{name}, and a pickle could run that; nothing of it was run. If you trust the file, load it "
            f"with torch.distributed.checkpoint.load, and pass the state dict to from_state_dict"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to data outside of the file")
