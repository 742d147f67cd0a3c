"""The index of a checkpoint, which makes it complete, and ``Contents``, what it says.

Rank 0 writes the index last. It has no entry for a rank, so it doesn't grow with their number.
Nothing here communicates.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from funcshard._utils import file_data, table, tree
from funcshard._utils.codec import encode
from funcshard._utils.options import check_flag, check_path
from funcshard._utils.process_state import without_collection
from funcshard._utils.table import Shown, Table
from funcshard.checkpoint.folders import (
    TRIES,
    StrPath,
    folders,
    has_our_index,
    pause,
    start_of_index,
    what_it_holds,
)
from funcshard.checkpoint.rank_files import (
    INDEX,
    RankReader,
    RankTable,
    damaged,
    files_of,
    missing,
    read_table,
    read_text,
    write_text,
)
from funcshard.checkpoint.stored_state import (
    FlatState,
    Plans,
    Stored,
    TreeSpec,
    any_plan,
    join,
    shard_buffers,
)
from funcshard.plan import (
    Plan,
    dtype_name,
    dtype_of,
    mesh_text,
    plan_from_data,
    plan_to_data,
)

_log = logging.getLogger("funcshard.checkpoint")

T = TypeVar("T")

# What readers of a tree raise if no version of this library wrote it.
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)

Watch = Callable[[int, int], object]
"""A function that is told how many bytes of how many are done."""


def unwatched(done: int, total: int) -> None:
    """Ignore the progress."""


@dataclass(frozen=True, slots=True, repr=False)
class Contents(Shown):
    """A description of a checkpoint; ``restore(path)`` returns it, and you can print it.

    Attributes:
        path: the checkpoint's folder.
        saved: time of the save, in nanoseconds since 1970.
        save: the token with which the names of its files begin.
        plan: the plan, or the dictionary of plans, as ``save`` got it.
        outline: the state's tree as JSON.
        shared: kind, dtype and shape of each tensor on one rank, but for ``PerRank`` values.
        bytes: bytes of the files of all ranks.
        tables: the tables of ranks, as far as read.

    Example:
        >>> import tempfile, torch, funcshard as fs
        >>> params = {"w": torch.zeros(2, 3)}
        >>> plan, mesh = fs.make_plan(params, 1), fs.Mesh()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/step-7"
        ...     _ = fs.save(path, {"shards": fs.shard(params, plan, mesh), "step": 7}, plan, mesh)
        ...     contents = fs.restore(path)
        >>> contents.values, contents.shared["shards.float32"].shape
        ({'step': 7}, (6,))
    """

    path: Path
    saved: int
    save: str
    plan: Plans
    outline: TreeSpec
    shared: Mapping[str, Stored]
    bytes: int
    tables: dict[int, RankTable] = field(default_factory=dict, compare=False)

    @property
    def values(self) -> dict[str, Any]:
        """Every number, bool and string that ranks share, by path, such as ``"config.depth"``."""
        values = _values(self.outline)
        pairs = [] if values is _NO_VALUES else tree.insertion_order(values)
        return {join(*path.split(".")): value for path, value in pairs}

    @property
    def world_size(self) -> int:
        return any_plan(self.plan).world_size

    def table(self, rank: int) -> RankTable:
        """Return the table of one rank, read from its file the first time.

        Raises:
            ValueError: the table or the rank's file of tensors is damaged or missing.
        """
        # Note: a table is read when it is needed; a restore needs those of few ranks.
        if rank not in self.tables:
            self.tables[rank] = read_table(self.path, self.save, rank)
        return self.tables[rank]

    def reader(self) -> RankReader:
        return RankReader(self.path, self.save, self.table)

    def check_files(self) -> Contents:
        """Return this; raise ``ValueError`` unless all files exist, and have their sizes."""
        total_bytes = 0
        # Why by name: files of a save that is running may go between a list and a look at them.
        for name in files_of(self.save, self.world_size):
            try:
                total_bytes += (self.path / name).lstat().st_size
            except FileNotFoundError:
                raise missing(self.path / name) from None
        # Note: the index has the sum alone, so that it doesn't grow with the number of ranks.
        if total_bytes != self.bytes:
            for rank in range(self.world_size):
                self.table(rank)  # which names a file that has changed
            raise damaged(self.path / INDEX)
        return self

    def check(self, watch: Watch = unwatched) -> None:
        """Read every file, and compare its checksum.

        Arguments:
            watch: ``watch(done, total)`` gets the number of bytes, for a progress bar.

        Raises:
            ValueError: a file differs from the one that was saved; the message names it.
        """
        ranks, done_bytes = range(self.world_size), 0
        total_bytes = sum(self.table(rank).size for rank in ranks)
        with self.reader() as reader:
            for nbytes in itertools.chain.from_iterable(map(reader.checked, ranks)):
                done_bytes += nbytes
                watch(done_bytes, total_bytes)

    def _parts(self) -> list[Table]:
        return [_table(self)]


def latest(folder: StrPath, *, thorough: bool = False) -> Path | None:
    """Return the path of the complete checkpoint in a folder that was saved last, or ``None``.

    It skips checkpoints that are incomplete. If other processes may be saving there, call it on one
    rank and send its answer to all.

    Arguments:
        folder: the folder that you save checkpoints in, if it exists.
        thorough: whether to skip a checkpoint in which any byte has changed.

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

    def look(contents: Contents) -> None:
        contents.check_files()
        if thorough:
            contents.check()

    for attempt in range(TRIES):
        saved_paths = _by_time(folder)
        for _, path in saved_paths:
            try:
                # Note: a damaged checkpoint must not stop a job that can begin with an older one.
                read_from(path, look)
            except (OSError, ValueError) as error:
                _log.warning("checkpoint %s is passed over: %s", path, error)
                continue
            return path
        # Another job may have saved a new checkpoint meanwhile, and deleted these.
        if saved_paths == _by_time(folder):
            break
        pause(attempt)
    return None


def _by_time(folder: Path) -> list[tuple[int, Path]]:
    """Return time and path of the checkpoints in a folder, the last one first."""
    # Why the time alone: an index may have some hundred MiB. One without a time is damaged, and
    # reading it says how.
    return sorted(
        ((_head_of(path)[0], path) for path in folders(folder)),
        key=lambda pair: (pair[0] == 0, pair),
        reverse=True,
    )


def read_values(path: StrPath) -> Any:
    """Return the numbers, bools and strings of a checkpoint, in the form of the state.

    You need neither a plan nor a mesh, so you can read a configuration before the model exists.

    Arguments:
        path: the checkpoint's folder, such as ``latest(folder)``.

    Returns:
        The state's values in dictionaries and lists. Keys that hold only tensors, shards and
        ``PerRank`` values are left out, and are ``None`` in lists.

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
    values = _values(read_contents(check_path("path", path)).outline)
    return None if values is _NO_VALUES else values


_NO_VALUES = object()


def _values(spec: TreeSpec) -> Any:
    """Return a node without its tensors, or ``_NO_VALUES`` if it holds only these."""
    if spec is None:
        return None
    if spec[0] in ("value", "tensor", "rank", "shards"):
        return spec[1] if spec[0] == "value" else _NO_VALUES
    node_kind, fields, meta, children = spec
    values = [_values(child) for child in children]
    if values and all(value is _NO_VALUES for value in values):
        return _NO_VALUES
    child_keys = meta if node_kind in ("dict", "ordered_dict") else fields
    # Note: a list keeps its length, so that indices mean the same as in the state.
    if child_keys is None:
        return [None if value is _NO_VALUES else value for value in values]
    pairs = zip(child_keys, values, strict=True)
    return {key: value for key, value in pairs if value is not _NO_VALUES}


# --- the index ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Index:
    """The data of an index; see ``Contents``."""

    # Note: time and token first, because _head_of reads them from the first bytes.
    saved: int
    save: str
    plan: object
    outline: object
    stored: Mapping[str, Stored]
    bytes: int


def write_index(
    path: Path, plans: Plans, flat: FlatState, save: str, saved: int, size: int
) -> None:
    """Write the index of a save, whose other files are complete, as ``SAVE.part``."""
    with without_collection():
        if isinstance(plans, Plan):
            plan_data = plan_to_data(plans)
        else:
            # Note: a reader tells one plan from several by the key "format", which a plan has.
            plan_data = {key: plan_to_data(plan) for key, plan in plans.items()}
        index = _Index(saved, save, plan_data, flat.spec, flat.shared, size)
        # Why in small parts: json.dumps stops all threads of Python until it's done.
        encoder = json.JSONEncoder(separators=(",", ":"), default=dtype_name)
        # Note: publish renames it, which is the moment at which the checkpoint exists.
        write_text(path / f"{save}.part", "".join(encoder.iterencode(encode(index))))


def time_after(folder: Path) -> int:
    """Return the time now, or a later one than that of every checkpoint in a folder."""
    current_time = time.time_ns()
    # Why: ``keep`` deletes checkpoints by the order of their times.
    for saved_time, path in _by_time(folder):
        if saved_time >= current_time:
            # Note: the clock of this host may be behind that of the host that saved it.
            with contextlib.suppress(OSError, ValueError):  # a damaged one
                # Why the whole index: its first bytes alone have no checksum.
                return min(read_contents(path).saved + 1, file_data.MOST)
    return current_time


def save_at(path: Path) -> str:
    """Return the token of the checkpoint at a path, or ``""``."""
    return _head_of(path)[1]


def _head_of(path: Path) -> tuple[int, str]:
    """Return time and token from the first bytes of an index."""
    head_pattern = rb'^\{"saved":(\d{1,20}),"save":"([0-9a-f]{8})"'
    head_match = re.search(head_pattern, start_of_index(path), re.MULTILINE)
    return (int(head_match[1]), head_match[2].decode()) if head_match else (0, "")


def read_from(path: StrPath, read: Callable[[Contents], T]) -> T:
    """Return what ``read`` makes of a checkpoint; start over if another save replaces it."""
    for attempt in range(TRIES):
        contents = read_contents(path)
        try:
            return read(contents)
        except (OSError, ValueError):
            # Note: if the token has changed, the files that were missing belong to a replaced save.
            if attempt == TRIES - 1 or save_at(contents.path) == contents.save:
                raise
        pause(attempt)
    raise AssertionError


@without_collection()
def read_contents(path: StrPath) -> Contents:
    """Read a checkpoint's index.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the checkpoint is incomplete or damaged.
    """
    path = Path(path).absolute()
    if path.is_file():
        remedy = (
            "torch.load(path, weights_only=True) reads what torch.save wrote, and from_state_dict "
            "makes shards of it"
        )
        if path.suffix == ".safetensors":
            remedy = "call import_safetensors(path, plan, mesh)"
        raise FileNotFoundError(
            f"there is no checkpoint at {path}, which is a file, and save makes a folder: {remedy}"
        )
    if not path.is_dir():
        raise FileNotFoundError(
            f"there is no checkpoint at {path}: there is no such folder"
        )
    index_file = path / INDEX
    try:
        index = read_text(index_file, _Index)
    except FileNotFoundError:
        raise _incomplete(path) from None
    try:
        plans = _plans_from(index.plan)
        # Note: other readers trust the tree after these walks over its nodes.
        shard_buffers(index.outline, plans)
        _values(index.outline)
        # Why: names of files begin with the token, and another one could lead out of the folder.
        if not re.fullmatch("[0-9a-f]{8}", index.save):
            raise ValueError(
                f"save must be 8 hexadecimal digits; found {index.save[:80]!r}"
            )
    except DAMAGE as error:  # no version of this library wrote it
        raise damaged(index_file, error) from None
    return Contents(
        path, index.saved, index.save, plans, index.outline, index.stored, index.bytes
    )


def _plans_from(data: Any) -> Plans:
    if "format" in file_data.table("plan", data):
        return plan_from_data(data)
    plans = {key: plan_from_data(plan_data) for key, plan_data in data.items()}
    if len({tuple(plan.mesh_axes.items()) for plan in plans.values()}) != 1:
        raise ValueError("the plans must be of one mesh")
    return plans


def _incomplete(path: Path) -> ValueError:
    # Note: latest and restore are easily mixed up.
    inner_names = [folder.name for folder in folders(path) if has_our_index(folder)]
    hint = what_it_holds(
        path,
        "its index.json is missing, so it was not saved to the end or has been deleted in part; "
        "restore another",
    )
    if inner_names:
        hint = f"it is a folder of checkpoints: name one of {inner_names[:4]}, or latest({str(path)!r})"
    return ValueError(f"{path} is not a complete checkpoint: {hint}")


# --- the table ------------------------------------------------------------------------------------


_MOST_VALUES = 20
_KEPT_AS = {"shard": "shards", "whole": "one copy", "rank": "each rank's own"}


def _table(contents: Contents) -> Table:
    saved_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(contents.saved / 1e9))
    if isinstance(contents.plan, Plan):
        plans_text = f"plan {contents.plan.fingerprint()}"
    else:
        named_plans = [f"{key} {plan.fingerprint()}" for key, plan in contents.plan.items()]
        plans_text = f"plans {', '.join(named_plans)}"
    axes = any_plan(contents.plan).mesh_axes
    title = f"Checkpoint {contents.path.name} of {saved_at}, saved by {mesh_text(axes)} under {plans_text}"
    values, buffers = contents.values, shard_buffers(contents.outline, contents.plan)
    everything = [*contents.shared.items()]
    for rank in range(contents.world_size):
        # Note: values of PerRank are in the tables alone, which is why these are read here.
        everything += contents.table(rank).stored.items()
    groups: dict[str, tuple[dict[str, None], Counter[str]]] = {}
    for name, facts in everything:
        sizes = [math.prod(facts.shape)]
        if facts.kind == "shard" and name in buffers:
            # Note: a whole leaf counts once, and a local one once for each index along its axes.
            buffer = buffers[name]
            sizes = [
                math.prod(leaf.whole_shape)
                for leaf in buffer.leaves
                for _ in range(math.prod(axes[axis] for axis in buffer.own_axes(leaf)))
            ]
        kinds, sums = groups.setdefault(facts.label, ({}, Counter()))
        kinds[f"{_KEPT_AS[facts.kind]}, {facts.dtype}"] = None
        nbytes = sum(sizes) * dtype_of(facts.dtype).itemsize
        sums.update(tensors=len(sizes), numel=sum(sizes), bytes=nbytes)
    rows = [
        [label, "; ".join(kinds), *_cells(sums)] for label, (kinds, sums) in groups.items()
    ]
    value_rows = [[path, f"= {value!r}"[:40], "", "", ""] for path, value in values.items()]
    rows += value_rows[:_MOST_VALUES]
    if len(values) > _MOST_VALUES:
        rows.append([f"and {len(values) - _MOST_VALUES} more values", "= '…'", "", "", ""])
    total_row = [
        "total",
        "",
        *_cells(sum((sums for _, sums in groups.values()), Counter())),
    ]
    return Table(title, ["what", "kept as", "tensors", "numel", "bytes"], rows, total_row)


def _cells(sums: Counter[str]) -> list[str]:
    return [
        table.count(sums["tensors"]),
        table.count(sums["numel"]),
        table.size(sums["bytes"]),
    ]
