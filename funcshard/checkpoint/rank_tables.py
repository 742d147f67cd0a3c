"""The table of each rank's file: which box of which tensor lies where, and the rank's own values.

Each rank writes its table beside its file of tensors. Restoring reads the tables of the ranks that
hold what it needs, so neither the index nor the work of a rank grows with the number of ranks. One
more file, ``sizes.json``, has the size of every file, so that ``latest`` sees a missing one.

Every text file of a checkpoint has two lines. The first has the checksum of the second.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funcshard._utils import file_data, read_regular, regular_size
from funcshard.checkpoint.block_files import in_folder
from funcshard.checkpoint.dcp_files import Region
from funcshard.checkpoint.folders import FORMAT, INDEX, OLD_FORMAT, SIZES
from funcshard.checkpoint.metadata import FlatState, TensorMetadata, TreeSpec
from funcshard.checkpoint.stored_fields import check_outline, items_from, regions_from, sizes_from

_LARGEST = 4 << 30  # bytes of a text file; the index of a million leaves has some hundred MiB


@dataclass(frozen=True, slots=True)
class RankTable:
    """The table of one rank.

    Attributes:
        own: the trees of the rank's ``PerRank`` values.
        items: metadata of the tensors in these values, by name.
        regions: the boxes in the rank's file, by name of the tensor.
    """

    own: Sequence[TreeSpec]
    items: Mapping[str, TensorMetadata]
    regions: Mapping[str, Sequence[Region]]


def file_of(rank: int) -> str:
    """Return the name of the file with a rank's tensors."""
    return f"__{rank}_0.distcp"


def table_of(rank: int) -> str:
    """Return the name of a rank's table."""
    return f"__{rank}_0.json"


def write_table(
    folder: Path, rank: int, flat: FlatState, regions: Sequence[Region], save: str
) -> None:
    """Write a rank's table; it appears in the folder when it is complete.

    Arguments:
        folder: the folder that holds the rank's file.
        rank: the rank.
        flat: its state.
        regions: the boxes in its file.
        save: the token of the save, which all files of a checkpoint share.
    """
    file = folder / file_of(rank)
    body = {
        "save": save,
        "own": flat.rank_specs,
        "items": {
            name: metadata.to_json()
            for name, metadata in flat.tensors.items()
            if metadata.kind == "rank"
        },
        "size": file.stat().st_size if regions else None,
        "regions": [
            (r.name, r.begin, r.offsets, r.sizes, r.offset, r.length, r.checksum) for r in regions
        ],
    }
    unfinished = folder / f".report.{rank}"
    write_text(unfinished, body)
    os.rename(unfinished, folder / table_of(rank))


def read_table(
    folder: Path,
    rank: int,
    save: str,
    mesh_axes: Mapping[str, int],
    shared: Mapping[str, TensorMetadata],
    at: int | None = None,
) -> RankTable:
    """Read a rank's table, and check that its file exists and has its size.

    Arguments:
        folder: the checkpoint's folder.
        rank: the rank.
        save: the token of the save.
        mesh_axes: size of each axis of the mesh that saved.
        shared: metadata of the tensors of the index, by name.
        at: descriptor of the folder, if it is open.

    Raises:
        ValueError: the table or the file is damaged or missing, or of another save.
    """
    path = folder / table_of(rank)
    body = _body(path, save, ("own", "items", "size", "regions"), at)
    try:
        size = body["size"] and file_data.whole("size", body["size"])
        items = items_from(body["items"], mesh_axes, rank)
        regions = regions_from(body["regions"], file_of(rank), size or 0, {**shared, **items})
        for rank_index, spec in enumerate(file_data.listed("own", body["own"])):
            check_outline(spec, items, None, rank_index)
    except ValueError as error:
        raise damaged(path, error) from None
    if size is not None:
        check_size(folder / file_of(rank), size, at)
    return RankTable(body["own"], items, regions)


def _body(path: Path, save: str, keys: Sequence[str], at: int | None) -> dict[str, Any]:
    """Return the data of a text file that belongs to a save."""
    try:
        table_text, _ = read_text(path, at)
    except FileNotFoundError:
        raise _missing(path) from None
    try:
        body = file_data.table("the file", file_data.parse(table_text), ("save", *keys))
    except ValueError as error:
        raise damaged(path, error) from None
    if body["save"] != save:
        raise ValueError(
            f"{path} is damaged: it belongs to another checkpoint; restore another checkpoint"
        )
    return body


def write_sizes(folder: Path, world_size: int, save: str) -> None:
    """Write the sizes of the files of all ranks, and of those that rank 0 has written already."""
    names = {name for rank in range(world_size) for name in (file_of(rank), table_of(rank))} | {
        ".metadata"
    }
    file_sizes = {
        entry.name: entry.stat().st_size for entry in os.scandir(folder) if entry.name in names
    }
    write_text(folder / SIZES, {"save": save, "files": dict(sorted(file_sizes.items()))})


def read_sizes(folder: Path, save: str, at: int | None = None) -> Mapping[str, int]:
    """Return the size of each file by name; take and raise what ``read_table`` does."""
    path = folder / SIZES
    body = _body(path, save, ("files",), at)
    try:
        return sizes_from(body["files"])
    except ValueError as error:
        raise damaged(path, error) from None


def check_size(file: Path, size: int, at: int | None = None) -> None:
    """Raise ``ValueError`` unless a regular file exists and has the size that it was saved with."""
    try:
        with in_folder(file, at) as name:
            file_size = regular_size(name, links=False, folder=at)
    except FileNotFoundError:
        raise _missing(file) from None
    if file_size != size:
        raise ValueError(
            f"{file} is damaged: it has {file_size} bytes and was saved with {size}; restore another "
            "checkpoint"
        )


def write_text(path: Path, body: Any) -> None:
    """Write JSON with its checksum, and sync it to the disk."""
    json_text = json.dumps(body, separators=(",", ":"))
    head = json.dumps({"format": FORMAT, "sha256": hashlib.sha256(json_text.encode()).hexdigest()})
    with open(path, "w") as file:
        file.write(f"{head}\n{json_text}\n")
        file.flush()
        os.fsync(file.fileno())


def read_text(path: Path, at: int | None = None) -> tuple[bytes, str]:
    """Return the JSON of a text file, and its checksum; of any version of the format.

    Arguments:
        path: the file.
        at: descriptor of its folder, if that is open.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, no regular file, or of a format that this version does not
            know.
    """
    with in_folder(path, at) as name:
        data = read_regular(name, most=_LARGEST, links=False, folder=at)
    try:
        first, body_text, *_ = data.split(b"\n")
        head = file_data.table("its first line", file_data.parse(first), ("format",))
    except ValueError as error:
        raise damaged(path, error) from None
    if head["format"] not in (FORMAT, OLD_FORMAT):
        format_text = file_data.shown(head["format"])
        raise ValueError(
            f"{path} is of format {format_text}; this version of funcshard reads {FORMAT!r}"
        )
    digest = hashlib.sha256(body_text).hexdigest()
    if head.get("sha256") != digest:
        raise ValueError(
            f"{path} is damaged: its checksum is not the one that was saved; restore another "
            "checkpoint"
        )
    return body_text, digest


def damaged(path: Path, why: Exception | None = None) -> ValueError:
    """Return the error for a text file that no version of the library wrote."""
    file_kind = "the index" if path.name == INDEX else "a file"
    reason = f" ({why})" if why else ""
    return ValueError(
        f"{path} is damaged: it is not {file_kind} of a checkpoint; restore another checkpoint{reason}"
    )


def _missing(path: Path) -> ValueError:
    return ValueError(
        f"{path} is missing, so the checkpoint is not complete; restore another checkpoint"
    )
