"""What a checkpoint says of itself: the index that makes it complete, and a description for people.

A checkpoint is a folder with an ``index.json``, which is written last and names every other file with its size. Its first
line holds the checksum of its second. Nothing here communicates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funcshard._utils import table
from funcshard.checkpoint.dcp_files import Region, check_region
from funcshard.checkpoint.flatten_state import Item, Outline, values
from funcshard.plan import AXES, Plan, dtype_of

__all__ = [
    "INDEX",
    "Contents",
    "check_replaceable",
    "folders",
    "latest",
    "leftovers",
    "locate",
    "publish",
    "read_contents",
    "remove",
    "sync",
    "write_index",
]

INDEX = "index.json"


_FORMAT = "funcshard.checkpoint/1"


@dataclass(frozen=True, slots=True, repr=False)
class Contents:
    """What is in a checkpoint; ``restore(path)`` returns it, and ``print`` shows a table.

    Attributes:
        path: the folder.
        saved: when it was published, in nanoseconds since 1970.
        plan: the plan that its shards were cut by.
        outline: the tree, with names and values at its leaves.
        own: the outlines of each rank's ``PerRank`` values.
        items: its tensors, by name.
        regions: where each of them lies, by name.
        digest: SHA-256 of the index.

    Example:
        >>> import tempfile, torch, funcshard as fs
        >>> params = {"w": torch.zeros(2, 3)}
        >>> plan, mesh = fs.make_plan(params, 1), fs.Mesh()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/step-7"
        ...     _ = fs.save(path, {"shards": fs.shard(params, plan, mesh), "step": 7}, plan, mesh)
        ...     contents = fs.restore(path)
        >>> contents.values, contents.items["shards.w"].shape
        ({'step': 7}, (2, 3))
    """

    path: Path
    saved: int
    plan: Plan
    outline: Outline
    own: Sequence[Sequence[Outline]]
    items: Mapping[str, Item]
    regions: Mapping[str, Sequence[Region]]
    digest: str

    @property
    def values(self) -> dict[str, Any]:
        """Every number and string that all ranks have alike, by its path."""
        return dict(values(self.outline))

    def check(self) -> None:
        """Read all of it and raise ``ValueError``, naming the file, unless every byte is as it was saved."""
        for regions in self.regions.values():
            for region in regions:
                check_region(self.path, region)

    def __str__(self) -> str:
        return table.as_text(*_columns(self), total=_total(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return table.as_html(*_columns(self), total=_total(self))


def write_index(
    folder: Path, plan: Plan, outline: Outline, own: Sequence[Any], items: Mapping[str, Item], regions: Sequence[Region]
) -> None:
    """Write the index of a folder that holds everything else."""
    files = sorted({region.file for region in regions} | {".metadata"})
    body = {
        "saved": time.time_ns(),
        "plan": json.loads(plan.to_json()),
        "outline": outline,
        "own": own,
        "items": {name: dataclasses.astuple(item) for name, item in items.items()},
        "regions": [dataclasses.astuple(region) for region in regions],
        "files": {file: (folder / file).stat().st_size for file in files},
    }
    text = json.dumps(body, separators=(",", ":"))
    head = json.dumps({"format": _FORMAT, "sha256": hashlib.sha256(text.encode()).hexdigest()})
    with open(folder / INDEX, "w") as file:
        file.write(f"{head}\n{text}\n")
        file.flush()
        os.fsync(file.fileno())


def read_contents(path: str | os.PathLike[str]) -> Contents:
    """Read a checkpoint's index and look whether its files are there.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it is not a complete checkpoint, or is damaged.
    """
    path = locate(path)
    index = path / INDEX
    if not path.is_dir():
        raise FileNotFoundError(f"there is no checkpoint at {path}: there is no such folder")
    if not index.exists():
        held = [folder.name for folder in folders(path)]
        hint = f"it is a folder of checkpoints: name one of {held[:4]}, or latest({str(path)!r})" if held else (
            "its index.json is missing, so it was not saved to the end or has been deleted in part; restore another"
        )  # fmt: skip
        raise ValueError(f"{path} is not a complete checkpoint: {hint}")
    try:
        first, text, *_ = index.read_text().split("\n")
        head = json.loads(first)
        if head["format"] != _FORMAT:
            raise ValueError(f"{index} is of format {head['format']!r}; this version of funcshard reads {_FORMAT!r}")
        digest = head["sha256"]
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        if "this version" in str(error):
            raise
        raise ValueError(f"{index} is damaged: it is no index of a checkpoint; restore another checkpoint") from None
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise ValueError(f"{index} is damaged: its checksum is not the one that was saved; restore another checkpoint")
    try:
        return _contents(path, json.loads(text), digest)
    except (KeyError, TypeError, AttributeError):  # no version of this library wrote it
        raise ValueError(f"{index} is damaged: it is no index of a checkpoint; restore another checkpoint") from None


def _contents(path: Path, body: Any, digest: str) -> Contents:
    _check_files(path, body["files"])
    items = {name: Item(tuple(shape), *rest) for name, (shape, *rest) in body["items"].items()}
    regions: dict[str, list[Region]] = {}
    for name, begin, offsets, sizes, file, *rest in body["regions"]:
        if file not in body["files"]:
            raise ValueError(f"{path / INDEX} is damaged: {name!r} lies in {file!r}, none of the checkpoint's files")
        regions.setdefault(name, []).append(Region(name, begin, tuple(offsets), tuple(sizes), file, *rest))
    plan = Plan.from_json(json.dumps(body["plan"]))
    return Contents(path, body["saved"], plan, body["outline"], body["own"], items, regions, digest)


def _check_files(path: Path, files: Mapping[str, int]) -> None:
    for name, size in files.items():
        file = path / name
        if Path(name).name != name or file.is_dir():
            raise ValueError(f"{path / INDEX} names the file {name!r}, which is not in the checkpoint's own folder")
        if not file.exists():
            raise ValueError(f"{file} is missing, so the checkpoint is not complete; restore another checkpoint")
        if file.stat().st_size != size:
            raise ValueError(
                f"{file} is damaged: it has {file.stat().st_size} bytes and was saved with {size}; restore another "
                f"checkpoint"
            )


def latest(folder: str | os.PathLike[str], *, thorough: bool = False) -> Path | None:
    """Return the complete checkpoint of a folder that was saved last, or ``None`` where there is none.

    What was not saved to the end, or has lost a file or a part of one, is passed over. Each rank looks by itself: where
    other processes may be saving, let one rank look and tell the others.

    Arguments:
        folder: the folder that checkpoints were saved in; it need not exist.
        thorough: read all of a checkpoint before taking it, and pass over one with any byte changed.

    Example:
        >>> import tempfile, torch, funcshard as fs
        >>> plan, mesh = fs.make_plan({"w": torch.zeros(2)}, 1), fs.Mesh()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in (9, 10):
        ...         _ = fs.save(f"{folder}/step-{step}", {"step": step}, plan, mesh)
        ...     fs.latest(folder).name
        'step-10'
    """
    found = []
    for path in folders(Path(folder)):
        try:
            contents = read_contents(path)
        except (OSError, ValueError):
            continue
        found.append((contents.saved, contents))
    for _, contents in sorted(found, key=lambda pair: pair[0], reverse=True):
        try:
            if thorough:
                contents.check()
        except (OSError, ValueError):
            continue
        return contents.path
    return None


def folders(folder: Path) -> list[Path]:
    """The checkpoints in a folder, by name; those that are being written have names that begin with a dot."""
    if not folder.is_dir():
        return []
    aside = {_final_name(path) for path in folder.glob(".*.old") if (path / INDEX).exists()}
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".") and (path / INDEX).exists()}
    return [folder / name for name in sorted(names | {name for name in aside if not (folder / name).exists()})]


def leftovers(path: Path) -> list[Path]:
    """What attempts to save a checkpoint of this path that were ended left beside it."""
    name = glob.escape(path.name)
    beside = [*path.parent.glob(f".{name}.*.part"), *path.parent.glob(f".{name}.*.old")]
    return [left for left in beside if _final_name(left) == path.name]


def locate(path: str | os.PathLike[str]) -> Path:
    """Return where a checkpoint lies: at its path, or, after a crash just while it was being replaced, beside it."""
    path = Path(path).absolute()
    if not path.exists():
        aside = [left for left in leftovers(path) if left.suffix == ".old"]
        return aside[0] if aside else path
    return path


def check_replaceable(path: Path) -> None:
    """Raise ``ValueError`` where something stands at a path that a checkpoint must not take the place of."""
    found = ""
    if path.is_symlink():
        found = "a link"
    elif path.is_file():
        found = "a file"
    elif path.is_dir() and not _has_our_index(path):
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError):  # renamed just now by who publishes it
            names = sorted(os.listdir(path))
        # a checkpoint that was deleted in part has nothing else in it
        foreign = [name for name in names if name not in (INDEX, ".metadata") and not name.endswith(".distcp")]
        found = f"a folder that holds {foreign[0]!r}" if foreign else ""
    if found:
        raise ValueError(
            f"path must be free, or that of a checkpoint, which is replaced; found {found} at {path}: choose another path"
        )


def publish(part: Path, path: Path) -> None:
    """Give a folder that is written its name, at once; what had the name before is deleted after that."""
    sync(part)
    old = part.with_suffix(".old")
    if path.exists():
        os.rename(path, old)
    os.rename(part, path)
    sync(path.parent)
    remove(old)


def remove(path: Path) -> None:
    """Delete a checkpoint, put aside first and its index before the rest: what remains is never taken for a whole one."""
    if not path.name.startswith("."):
        aside = path.with_name(f".{path.name}.deleted.part")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)
        path = aside
    (path / INDEX).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def sync(folder: Path) -> None:
    """Have the disk keep the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _has_our_index(folder: Path) -> bool:
    try:
        with open(folder / INDEX, "rb") as file:
            return _FORMAT.encode() in file.readline(1000)
    except OSError:
        return False


def _final_name(path: Path) -> str:
    """``.NAME.TOKEN.old`` -> ``NAME``."""
    return path.name[1:].rsplit(".", 2)[0]


def _columns(contents: Contents) -> tuple[str, list[str], list[list[str]]]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(contents.saved / 1e9))
    replicate, shard = contents.plan.mesh_shape
    ranks = f"{contents.plan.world_size} rank{'s' if contents.plan.world_size > 1 else ''}"
    mesh = f"{ranks} = {replicate} replicate × {shard} shard" if replicate > 1 else ranks
    title = f"Checkpoint {contents.path.name} of {when}, saved by {mesh} under plan {contents.plan.fingerprint()}"
    rows = [
        [label, "; ".join(kinds), *map(table.count, numbers), table.size(size)]
        for label, (kinds, *numbers, size) in _groups(contents).items()
    ]
    rows += [[path, f"= {value!r}"[:40], "", "", ""] for path, value in _some(contents.values)]
    return title, ["what", "kept as", "tensors", "numel", "bytes"], rows


def _groups(contents: Contents) -> dict[str, Any]:
    groups: dict[str, list[Any]] = {}
    words = {"sharded": "shards", "whole": "one copy", "local": "each rank's own", "rank": "each rank's own"}
    words |= {f"local {axis}": f"each place's along {axis}" for axis in AXES}
    replicate, shard = contents.plan.mesh_shape
    places = {"local": replicate * shard, "local replicate": replicate, "local shard": shard}
    for item in contents.items.values():
        group = groups.setdefault(item.label, [[], 0, 0, 0])
        kind = f"{words[item.kind]}, {item.dtype}"
        group[0] += [kind] if kind not in group[0] else []
        copies = places.get(item.kind, 1)
        for i, number in enumerate((1, item.numel, item.numel * dtype_of(item.dtype).itemsize), start=1):
            group[i] += number * copies
    return groups


def _total(contents: Contents) -> list[str]:
    groups = list(_groups(contents).values())
    tensors, numel, size = (sum(group[i] for group in groups) for i in (1, 2, 3))
    return ["total", "", table.count(tensors), table.count(numel), table.size(size)]


def _some(found: Mapping[str, Any], most: int = 20) -> list[tuple[str, Any]]:
    pairs = list(found.items())
    return pairs[:most] if len(pairs) <= most else [*pairs[:most], (f"and {len(pairs) - most} more values", "…")]
