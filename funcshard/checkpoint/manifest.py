"""The manifest of a checkpoint: the index that makes it complete, and ``Contents``.

A checkpoint is a folder with an ``index.json``, which rank 0 writes last. The index describes the
state, and ``rank_tables`` the files of each rank. Nothing here communicates.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from funcshard._utils import Shown, Table, check_flag, check_path, file_data, open_regular, table
from funcshard.checkpoint.block_files import open_file
from funcshard.checkpoint.dcp_files import Region, check_region
from funcshard.checkpoint.dcp_metadata import METADATA
from funcshard.checkpoint.folders import INDEX, SIZES, folders, has_our_index, locate
from funcshard.checkpoint.foreign_folders import foreign_remedy
from funcshard.checkpoint.metadata import (
    Plans,
    TensorMetadata,
    TreeSpec,
    any_plan,
    replicated_values,
)
from funcshard.checkpoint.open_folder import OpenFolder, read_from
from funcshard.checkpoint.rank_tables import (
    RankTable,
    check_size,
    damaged,
    file_of,
    read_sizes,
    read_table,
    read_text,
    write_text,
)
from funcshard.checkpoint.stored_fields import (
    check_outline,
    items_from,
    old_region_from,
    sizes_from,
)
from funcshard.plan import Plan, dtype_of, mesh_text, plan_from_data

_log = logging.getLogger("funcshard.checkpoint")


@dataclass(frozen=True, slots=True, repr=False)
class Contents(Shown):
    """A description of a checkpoint; ``restore(path)`` returns it, and ``print`` shows a table.

    Attributes:
        path: the checkpoint's folder.
        saved: time at which it was saved, in nanoseconds since 1970.
        plan: the plan that its shards were cut by, or a dictionary of plans, as ``save`` got it.
        outline: the state's tree as JSON, with names of tensors and values at its leaves.
        shared: shape, dtype and kind of each tensor, by name, without those in ``PerRank`` values.
        digest: SHA-256 of the index.
        save: the token of the save, which all files share; ``""`` for a checkpoint of the old
            format, whose index holds the tables of all ranks.
        tables: the tables of ranks that have been read.

    Example:
        >>> import tempfile, torch, funcshard as fs
        >>> params = {"w": torch.zeros(2, 3)}
        >>> plan, mesh = fs.make_plan(params, 1), fs.Mesh()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/step-7"
        ...     _ = fs.save(path, {"shards": fs.shard(params, plan, mesh), "step": 7}, plan, mesh)
        ...     contents = fs.restore(path)
        >>> contents.values, contents.shared["shards.w"].shape
        ({'step': 7}, (2, 3))
    """

    path: Path
    saved: int
    plan: Plans
    outline: TreeSpec
    shared: Mapping[str, TensorMetadata]
    digest: str
    save: str = ""
    tables: dict[int, RankTable] = field(default_factory=dict, compare=False)
    _listing: str | None = None
    _at: int | None = field(default=None, compare=False)

    @property
    def values(self) -> dict[str, Any]:
        """Every number, bool and string that is the same on every rank, by path in the state.

        A path joins keys, fields and indices with dots, as in ``"config.model.depth"``.
        ``read_values`` returns the same values as nested dictionaries and lists.
        """
        return replicated_values(self.outline)

    def table(self, rank: int) -> RankTable:
        """Return the table of one rank, which is read from its file the first time.

        Raises:
            ValueError: the table or the rank's file of tensors is damaged or missing.
        """
        if rank not in self.tables:
            self.tables[rank] = read_table(
                self.path, rank, self.save, self.mesh_axes, self.shared, self._at
            )
        return self.tables[rank]

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Size of each axis of the mesh that saved it."""
        return any_plan(self.plan).mesh_axes

    @property
    def world_size(self) -> int:
        """Number of ranks that saved it."""
        return any_plan(self.plan).world_size

    @property
    def items(self) -> dict[str, TensorMetadata]:
        """Shape, dtype and kind of each tensor, by name; reads the tables of all ranks."""
        all_items = dict(self.shared)
        for rank in range(self.world_size):
            all_items |= self.table(rank).items
        return all_items

    @property
    def regions(self) -> dict[str, list[Region]]:
        """The boxes of each tensor in files, by name; reads the tables of all ranks."""
        all_regions: dict[str, list[Region]] = {}
        for rank in range(self.world_size):
            for name, name_regions in self.table(rank).regions.items():
                all_regions.setdefault(name, []).extend(name_regions)
        return all_regions

    @property
    def bytes(self) -> int:
        """Bytes of all tensors outside ``PerRank`` values, without the heads of files."""
        axes, total = self.mesh_axes, 0
        for stored_item in self.shared.values():
            copies = math.prod(axes[axis] for axis in stored_item.own_axes)
            total += (
                math.prod(stored_item.whole_shape) * dtype_of(stored_item.dtype).itemsize * copies
            )
        return total

    def check(self) -> None:
        """Read every file, and compare its checksum.

        Raises:
            ValueError: a file differs from the one that was saved; the message names it.
        """
        for rank in range(self.world_size):
            for regions in self.table(rank).regions.values():
                for region in regions:
                    check_region(self.path, region, self._at)
        if self._listing is not None:
            _check_listing(self.path / METADATA, self._listing, self._at)

    def _parts(self) -> list[Table]:
        return [_table(self)]


def latest(folder: str | os.PathLike[str], *, thorough: bool = False) -> Path | None:
    """Return the path of the complete checkpoint in a folder that was saved last, or ``None``.

    A checkpoint is passed over if its saving was interrupted, or if a file is missing or has
    another size. Each rank that calls looks for itself. If other processes may be saving there,
    call it on one rank and send its answer to all ranks.

    Arguments:
        folder: the folder that checkpoints are saved in. It need not exist.
        thorough: whether to read all of a checkpoint, and to pass it over if a byte has changed.

    Raises:
        ValueError: ``folder`` is itself a checkpoint.

    Example:
        >>> import tempfile, torch, funcshard as fs
        >>> plan, mesh = fs.make_plan({"w": torch.zeros(2)}, 1), fs.Mesh()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in (9, 10):
        ...         _ = fs.save(f"{folder}/step-{step}", {"step": step}, plan, mesh)
        ...     fs.latest(folder).name
        'step-10'
    """
    check_flag("thorough", thorough)
    folder = check_path("folder", folder)
    if has_our_index(folder):
        raise ValueError(
            "latest takes the folder that checkpoints are saved in; found a checkpoint itself, "
            f"{folder}"
        )
    # Why the time alone: an index may have some hundred MiB. One without a time is damaged, and
    # _look says how.
    saved_paths = sorted(
        ((_time_of(path), path) for path in folders(folder)),
        key=lambda pair: (pair[0] == 0, pair),
        reverse=True,
    )
    for _, path in saved_paths:
        try:
            # Why only now: it looks at the files of all ranks.
            read_from(path, lambda each: _look(each, thorough))
        except (OSError, ValueError) as error:
            _log.warning("checkpoint %s is passed over: %s", path, error)
            continue
        return path
    return None


def read_values(path: str | os.PathLike[str]) -> Any:
    """Return the numbers, bools and strings of a checkpoint, in the form of the state.

    You need neither a plan nor a mesh, so it can read a configuration before the model exists. No
    code of the checkpoint runs. Each rank that calls reads by itself.

    Arguments:
        path: the checkpoint's folder; ``latest(folder)`` finds the last one.

    Returns:
        The state's values in dictionaries and lists; a named tuple is a dictionary of its fields.
        Keys whose values hold nothing but tensors, shards and ``PerRank`` values are left out, and
        ``None`` takes their places in lists.

    Raises:
        FileNotFoundError: there is no folder at ``path``.
        ValueError: the checkpoint is incomplete or its index is damaged.

    Example:
        >>> import tempfile, torch, funcshard as fs
        >>> params = {"w": torch.zeros(2, 3)}
        >>> plan, mesh = fs.make_plan(params, 1), fs.Mesh()
        >>> state = {"shards": fs.shard(params, plan, mesh), "config": {"depth": 2}, "step": 7}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fs.read_values(fs.save(f"{folder}/step-7", state, plan, mesh).path)
        {'config': {'depth': 2}, 'step': 7}
    """
    return _values(read_contents(check_path("path", path), whole=False).outline)[0]


def _values(spec: TreeSpec) -> tuple[Any, bool]:
    """Return a node without its tensors, and whether it holds a value or is empty."""
    if spec is None or spec[0] in ("tensor", "rank", "shards"):
        return None, spec is None
    if spec[0] == "value":
        return spec[1], True
    node_kind, fields, meta, children = spec
    below = [_values(child) for child in children]
    keys = meta if node_kind in ("dict", "ordered_dict") else fields
    holds = not below or any(has_value for _, has_value in below)
    if keys is None:
        return [value for value, _ in below], holds
    return {
        key: value for key, (value, has_value) in zip(keys, below, strict=True) if has_value
    }, holds


def _look(folder: OpenFolder, thorough: bool) -> None:
    contents = read_folder(folder)
    if thorough:
        contents.check()


# --- the index ------------------------------------------------------------------------------------

# Why the keys of the index have other names than the classes of this wing: checkpoints that were
# saved by the first versions must restore, so the keys never change.


def write_index(
    folder: Path,
    plans: Plans,
    spec: TreeSpec,
    tensors: Mapping[str, TensorMetadata],
    save: str,
    saved: int,
) -> None:
    """Write the index of a folder that holds all other files of a checkpoint.

    It has no entry for a rank, so it does not grow with the number of ranks.

    Arguments:
        folder: the folder.
        plans: the plans that the state was cut by.
        spec: the tree of the state.
        tensors: metadata of all tensors outside ``PerRank`` values.
        save: the token of the save.
        saved: the time of the save.
    """
    listing = folder / METADATA
    body = {
        "saved": saved,
        "save": save,
        "plan": json.loads(plans.to_json()) if isinstance(plans, Plan) else None,
        "plans": None
        if isinstance(plans, Plan)
        else {key: json.loads(plan.to_json()) for key, plan in plans.items()},
        "outline": spec,
        "items": {name: metadata.to_json() for name, metadata in tensors.items()},
        "listing": _digest_of(listing)
        if listing.exists()
        else None,  # absent in checkpoints of the first versions
    }
    write_text(folder / INDEX, body)


def _digest_of(file: Path, at: int | None = None) -> str:
    """Return the SHA-256 of a file's bytes."""
    with open(open_file(file, at), "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _check_listing(file: Path, digest: str, at: int | None) -> None:
    try:
        listing_digest = _digest_of(file, at)
    except FileNotFoundError:
        listing_digest = "nothing"
    if listing_digest != digest:
        raise ValueError(
            f"{file} is damaged: its bytes are not those that were saved; restore another "
            "checkpoint"
        )


def time_after(folder: Path) -> int:
    """Return the time now, but a later one than that of every checkpoint in a folder.

    The order of checkpoints is that of their times, by which old ones are deleted.
    """
    current_time = time.time_ns()
    later_saves = sorted(
        (
            (saved_time, path)
            for path in folders(folder)
            if (saved_time := _time_of(path)) >= current_time
        ),
        reverse=True,
    )
    for _, path in later_saves:
        try:
            return min(read_contents(path, whole=False).saved + 1, file_data.MOST)
        except (OSError, ValueError):  # a damaged one
            continue
    return current_time


def _time_of(path: Path) -> int:
    """Return the time in the index of a checkpoint, from its first bytes alone, or 0."""
    try:
        with open(open_regular(locate(path) / INDEX, links=False), "rb") as file:
            time_match = re.search(rb'^\{"saved":(\d{1,20})\b', file.read(1000), re.MULTILINE)
    except (OSError, ValueError):
        return 0
    return int(time_match[1]) if time_match else 0


def is_overwritten(path: Path) -> bool:
    """Return whether another program wrote its own ``.metadata`` over that of a checkpoint."""
    try:
        sizes = sizes_from(file_data.parse(read_text(path / SIZES)[0])["files"])
        return sizes.get(METADATA, 0) != (path / METADATA).stat().st_size
    except (OSError, ValueError, KeyError, TypeError):  # no such file, or a damaged one
        return False


def read_contents(path: str | os.PathLike[str], *, whole: bool = True) -> Contents:
    """Read a checkpoint's index.

    Arguments:
        path: the folder.
        whole: whether to check that the files of all ranks exist and have their sizes.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the folder is not a complete checkpoint, or is damaged.
    """
    try:
        return read_from(
            path, lambda folder: dataclasses.replace(read_folder(folder, whole=whole), _at=None)
        )
    except (FileNotFoundError, NotADirectoryError):
        raise absent(path) from None


def absent(path: str | os.PathLike[str]) -> FileNotFoundError:
    """Return the error for a path at which there is no folder."""
    path = Path(path).absolute()
    if not path.is_file():
        return FileNotFoundError(f"there is no checkpoint at {path}: there is no such folder")
    remedy = "torch.load(path, weights_only=True) reads what torch.save wrote, and from_state_dict makes shards of it"
    if path.suffix == ".safetensors":
        remedy = "call import_safetensors(path, plan, mesh)"
    return FileNotFoundError(
        f"there is no checkpoint at {path}, which is a file, and save makes a folder: {remedy}"
    )


def read_folder(folder: OpenFolder, *, whole: bool = True) -> Contents:
    """Do the same in a folder that is open, and return contents that are read while it is."""
    path, at = folder.path, folder.descriptor
    index = path / INDEX
    if INDEX not in os.listdir(at):
        inner = [
            checkpoint_folder.name
            for checkpoint_folder in folders(path)
            if has_our_index(locate(checkpoint_folder))
        ]
        hint = "its index.json is missing, so it was not saved to the end or has been deleted in part; restore another"
        if inner:
            hint = (
                f"it is a folder of checkpoints: name one of {inner[:4]}, or latest({str(path)!r})"
            )
        hint = hint if inner else foreign_remedy(at) or hint
        raise ValueError(f"{path} is not a complete checkpoint: {hint}")
    try:
        index_text, digest = read_text(index, at)
    except ValueError:
        if foreign_text := foreign_remedy(at):
            raise ValueError(
                f"{index} is no index of a checkpoint of funcshard: {foreign_text}"
            ) from None
        raise
    try:
        body = file_data.table(
            "the index", file_data.parse(index_text), ("saved", "plan", "outline", "items")
        )
        if old := "regions" in body or "files" in body:
            contents = _old_contents(folder, body, digest)
            sizes = sizes_from(body["files"])
        else:
            contents = _contents(folder, body, digest, file_data.text("save", body.get("save")))
    except ValueError as error:  # no version of this library wrote it
        raise damaged(index, error) from None
    if old:
        _check_files(folder, INDEX, sizes)
    elif whole:
        _check_files(folder, SIZES, read_sizes(path, contents.save, at))
    return contents


def _contents(folder: OpenFolder, body: Mapping[str, Any], digest: str, save: str = "") -> Contents:
    plans = _plans_from(body)
    tensors = items_from(body["items"], any_plan(plans).mesh_axes)
    check_outline(body["outline"], tensors, plans)
    saved, listing = file_data.whole("saved", body["saved"]), body.get("listing")
    if listing is not None:
        file_data.text("listing", listing)
    at = folder.descriptor
    return Contents(
        folder.path, saved, plans, body["outline"], tensors, digest, save, _listing=listing, _at=at
    )


def _plans_from(body: Mapping[str, Any]) -> Plans:
    if body.get("plans") is None:
        return plan_from_data(body["plan"])
    plans = {
        key: plan_from_data(data) for key, data in file_data.table("plans", body["plans"]).items()
    }
    if len({tuple(plan.mesh_axes.items()) for plan in plans.values()}) != 1:
        raise ValueError("the plans must be of one mesh")
    return plans


def _old_contents(folder: OpenFolder, body: Mapping[str, Any], digest: str) -> Contents:
    """Return the contents of a checkpoint of the old format, with the tables of all ranks."""
    file_data.table("the index", body, ("files", "own", "regions"))
    contents, files = _contents(folder, body, digest), sizes_from(body["files"])
    regions: dict[str, dict[str, list[Region]]] = {}  # by file and name
    for data in file_data.listed("regions", body["regions"]):
        region = old_region_from(data, files, contents.shared)
        regions.setdefault(region.file, {}).setdefault(region.name, []).append(region)
    for rank, rank_specs in enumerate(file_data.listed("own", body["own"], contents.world_size)):
        for rank_index, spec in enumerate(file_data.listed("own", rank_specs)):
            check_outline(spec, contents.shared, None, rank_index)
        contents.tables[rank] = RankTable(rank_specs, {}, regions.get(file_of(rank), {}))
    return contents


def _check_files(folder: OpenFolder, listed_in: str, files: Mapping[str, int]) -> None:
    for name, size in files.items():
        file = folder.path / name
        if Path(name).name != name or file.is_dir():
            where = folder.path / listed_in
            raise ValueError(
                f"{where} names the file {name!r}, which is not in the checkpoint's own folder"
            )
        check_size(file, size, folder.descriptor)


# --- the table ------------------------------------------------------------------------------------


def _table(contents: Contents) -> Table:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(contents.saved / 1e9))
    if isinstance(contents.plan, Plan):
        plans = f"plan {contents.plan.fingerprint()}"
    else:
        plans = "plans " + ", ".join(
            f"{key} {plan.fingerprint()}" for key, plan in contents.plan.items()
        )
    title = f"Checkpoint {contents.path.name} of {when}, saved by {mesh_text(contents.mesh_axes)} under {plans}"
    rows = [
        [label, "; ".join(kinds), *map(table.count, numbers), table.size(size)]
        for label, (kinds, *numbers, size) in _groups(contents).items()
    ]
    rows += [[path, f"= {value!r}"[:40], "", "", ""] for path, value in _shortened(contents.values)]
    return Table(title, ["what", "kept as", "tensors", "numel", "bytes"], rows, _total(contents))


def _groups(contents: Contents) -> dict[str, Any]:
    """Return ``[kinds, number of tensors, elements, bytes]`` of the tensors of each label."""
    groups: dict[str, list[Any]] = {}
    words = {
        "sharded": "shards",
        "whole": "one copy",
        "local": "each rank's own",
        "rank": "each rank's own",
    }
    mesh_axes = contents.mesh_axes
    for metadata in contents.items.values():
        group = groups.setdefault(metadata.label, [[], 0, 0, 0])
        axes = metadata.own_axes
        along = f"one for each index along {' and '.join(axes)}" if axes else words["sharded"]
        along += (
            f", in slices along {' and '.join(cut.axis for cut in metadata.cuts)}"
            if metadata.cuts
            else ""
        )
        group_kind = (
            f"{along if metadata.cuts else words.get(metadata.kind, along)}, {metadata.dtype}"
        )
        group[0] += [group_kind] if group_kind not in group[0] else []
        copies = math.prod(mesh_axes[axis] for axis in axes)
        numel = math.prod(metadata.whole_shape)
        for i, row_count in enumerate(
            (1, numel, numel * dtype_of(metadata.dtype).itemsize), start=1
        ):
            group[i] += row_count * copies
    return groups


def _total(contents: Contents) -> list[str]:
    groups = list(_groups(contents).values())
    tensors, numel, size = (sum(group[i] for group in groups) for i in (1, 2, 3))
    return ["total", "", table.count(tensors), table.count(numel), table.size(size)]


def _shortened(found: Mapping[str, Any], most: int = 20) -> list[tuple[str, Any]]:
    pairs = list(found.items())
    return (
        pairs[:most]
        if len(pairs) <= most
        else [*pairs[:most], (f"and {len(pairs) - most} more values", "…")]
    )
