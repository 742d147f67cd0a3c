"""``save`` and ``restore``: every rank writes and reads its own pieces, and a checkpoint is there whole or not at all.

Ranks write into a folder aside, named by a token that they agreed on. When rank 0 has seen the report of every rank there,
it writes the index, and renames the folder: that publishes it. The reports are files, so that what is done in the background
takes no part in any collective and cannot come between those of training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from funcshard.checkpoint.dcp_files import Region, read_pieces, write_metadata, write_pieces
from funcshard.checkpoint.flatten_state import Item, Parts, Piece, check_alike, facts, take_apart
from funcshard.checkpoint.manifest import (
    Contents,
    check_replaceable,
    folders,
    leftovers,
    publish,
    read_contents,
    remove,
    sync,
    write_index,
)
from funcshard.checkpoint.unflatten_state import Place, put_together
from funcshard.comm import Mesh, all_gather_texts
from funcshard.core import check_mesh
from funcshard.plan import Plan

__all__ = ["Saving", "restore", "save"]


@dataclass(slots=True, eq=False)
class Saving:
    """A checkpoint that is being saved; ``save`` returns it.

    Attributes:
        path: where the checkpoint will be once it is whole.

    Example:
        >>> import tempfile, torch, funcshard as fs
        >>> plan, mesh = fs.make_plan({"w": torch.zeros(2)}, 1), fs.Mesh()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saving = fs.save(f"{folder}/step-3", {"step": 3}, plan, mesh, wait=False)
        ...     saving.wait().name, saving.done
        ('step-3', True)
    """

    path: Path
    _mesh: Mesh
    _part: Path
    _thread: threading.Thread | None = None
    _error: str = ""
    _outcome: str | None = None

    @property
    def done(self) -> bool:
        """Whether this rank's part of the work is over; asks no other rank."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Return the path once the checkpoint is there; every rank has to call it.

        Raises:
            OSError: some rank could not write its part; the same on every rank. Nothing is left at ``path``, or what was
                there before.
        """
        if self._outcome is None:
            all_gather_texts(self._mesh, "")  # ranks of a simulation have all begun once this returns, so all will end
            if self._thread is not None:
                self._thread.join()
            errors = all_gather_texts(self._mesh, self._error)
            told = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error and not error.startswith("rank ")]
            self._outcome = "; ".join(told) or next((error for error in errors if error), "")
            self._thread = None
            if self._outcome:
                shutil.rmtree(self._part, ignore_errors=True)
        if self._outcome:
            raise OSError(f"checkpoint {self.path} is not saved: {self._outcome}")
        return self.path


def save(
    path: str | os.PathLike[str],
    state: Any,
    plan: Plan,
    mesh: Mesh,
    *,
    wait: bool = True,
    after: Saving | None = None,
    keep: int | None = None,
    timeout: float = 600.0,
) -> Saving:
    """Save a state as a checkpoint, every rank its own pieces; ``restore`` is the inverse.

    What stands in the state is written down under the module's names, so that it survives a change of plan: in each tree
    that looks like ``shards`` (parameters, averages of them, optimizer states with tensors of a shard's size) leaf by leaf.
    Every other tensor, number and string has to be the same on every rank, and is stored once; what is a rank's own is
    marked with ``PerRank``. The checkpoint is written aside, synced, and published by a rename, after which it is whole.

    Arguments:
        path: the folder to make, on a disk that all ranks share; a checkpoint that is there already is replaced, anything
            else is left alone.
        state: any pytree, such as ``{"train": TrainState, "ema": shards, "own": PerRank(...), "epoch": 3}``.
        plan: the plan of the trees of shards in it; it is stored too.
        mesh: the ranks.
        wait: whether to return when the checkpoint is there. If not, the state is copied to the CPU and the rest happens in
            the background, without collectives; call ``wait()`` of what is returned at the end.
        after: what an earlier ``save`` returned. It is waited for first, so that no more than one is under way.
        keep: number of checkpoints to keep in the folder around ``path``; older ones are deleted once this one is there.
        timeout: seconds that rank 0 waits for the other ranks to write their parts.

    Returns:
        The saving; its ``wait()`` returns the path.

    Raises:
        TypeError: a leaf of the state is neither a tensor nor a number or string.
        ValueError: the plan is not that of the state's shards, or ranks differ in what is not marked as their own; at
            ``path`` there is something else than a checkpoint, or a saving is under way.
        OSError: some rank could not write its part; with ``wait=False`` it is raised by ``wait()``.

    Example:
        >>> import tempfile, torch, funcshard as fs
        >>> params = {"w": torch.arange(4.0)}
        >>> def main(mesh, folder):
        ...     plan = fs.make_plan(params, mesh)
        ...     state = {"shards": fs.shard(params, plan, mesh), "step": 7, "own": fs.PerRank(mesh.rank)}
        ...     fs.save(f"{folder}/step-7", state, plan, mesh)
        ...     return fs.restore(f"{folder}/step-7", plan, mesh)["shards"][""]["float32"].tolist()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fs.simulate(lambda mesh: main(mesh, folder), world_size=2)
        [[0.0, 1.0], [2.0, 3.0]]
    """
    if after is not None:
        after.wait()
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be at least 1, the checkpoint that is saved; found {keep}")
    check_mesh(plan, mesh)
    path, fault, parts = Path(path).absolute(), None, Parts(None)
    try:
        if mesh.rank == 0:
            _check_path(path)
        parts = take_apart(state, plan, mesh.rank, mesh.device.type)
    except (TypeError, ValueError) as error:
        fault = error
    _raise_together(mesh, fault)
    reports = [
        json.loads(text) for text in all_gather_texts(mesh, json.dumps([str(path), secrets.token_hex(4), _digest(parts)]))
    ]
    if len({report[0] for report in reports}) > 1:
        raise ValueError(f"path must be the same on every rank; found {sorted({report[0] for report in reports})}")
    if len({report[2] for report in reports}) > 1:  # only then do ranks tell each other everything
        check_alike([json.loads(text) for text in all_gather_texts(mesh, json.dumps(facts(parts)))])
    part = path.with_name(f".{path.name}.{reports[0][1]}.part")
    pieces = parts.pieces if wait else [dataclasses.replace(p, tensor=_copied(p.tensor)) for p in parts.pieces]
    saving = Saving(path, mesh, part)
    work = _Work(path, part, plan, parts, pieces, mesh.rank, mesh.world_size, keep, timeout, saving)
    saving._thread = threading.Thread(target=work.run, name=_thread_name(path, mesh.rank))
    saving._thread.start()
    if wait:
        saving.wait()
    return saving


def restore(path: str | os.PathLike[str], plan: Plan | None = None, mesh: Mesh | None = None) -> Any:
    """Restore what ``save`` saved, under the same plan or another; without a plan, say what is there.

    No code of the checkpoint's runs: what it says of itself is JSON, its tensors are read as ``torch.load`` does with
    ``weights_only=True`` once their checksums have been compared, and a namedtuple is made only of a class that is loaded.

    Arguments:
        path: the checkpoint's folder; ``latest(folder)`` finds the last one.
        plan: how its trees of shards shall be cut now: other units, strategies and numbers of ranks than they were saved
            with. Rank ``r`` takes the ``PerRank`` values of the old rank ``r`` modulo the old number of ranks.
        mesh: the ranks, of the plan's shape.

    Returns:
        The state, a tree of the same types as was saved, with its tensors on the mesh's device, or on the CPU where they
        were there beside a mesh on another device. Without ``plan`` and ``mesh``, a ``Contents``, which ``print`` shows.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ValueError: the checkpoint is not complete or damaged, which is said with the file's name, or the plan is of another
            model. The same on every rank.

    Example:
        >>> import tempfile, torch, funcshard as fs
        >>> params = {"w": torch.arange(4.0)}
        >>> def begin(mesh, path):
        ...     plan = fs.make_plan(params, mesh)
        ...     fs.save(path, fs.shard(params, plan, mesh), plan, mesh)
        >>> def go_on(mesh, path):
        ...     return fs.restore(path, fs.make_plan(params, mesh), mesh)[""]["float32"].tolist()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = fs.simulate(lambda mesh: begin(mesh, f"{folder}/last"), world_size=2)
        ...     fs.simulate(lambda mesh: go_on(mesh, f"{folder}/last"), world_size=3)
        [[0.0, 1.0], [2.0, 3.0], [0.0, 0.0]]
    """
    if plan is None and mesh is None:
        return read_contents(path)
    if plan is None or mesh is None:
        raise ValueError("restore takes a path alone, which says what is there, or a path, a plan and a mesh")
    check_mesh(plan, mesh)
    fault: Exception | None = None
    state, digest = None, ""
    try:
        contents = read_contents(path)
        digest = contents.digest
        state = _read(contents, plan, mesh)
    except (OSError, ValueError) as error:
        fault = error
    _raise_together(mesh, fault)
    if len(set(all_gather_texts(mesh, digest))) > 1:
        raise ValueError(
            f"ranks found different checkpoints at {path}: it was replaced meanwhile, or their disks are not one"
        )
    return state


def _read(contents: Contents, plan: Plan, mesh: Mesh) -> Any:
    source = mesh.rank % contents.plan.world_size
    cpu = torch.device("cpu")
    place: Place = lambda item, unit: cpu if not item.on_mesh or (unit and unit.offload) else mesh.device  # noqa: E731
    wanted = put_together(
        contents.outline, contents.own[source], contents.items, plan, mesh.rank, contents.plan.mesh_shape, place
    )
    read_pieces(contents.path, wanted.requests, contents.regions)
    wanted.check()
    return wanted.state


@dataclass(frozen=True, slots=True)
class _Work:
    """What happens in the background: this rank's part is written, and rank 0 publishes all of them."""

    path: Path
    part: Path
    plan: Plan
    parts: Parts
    pieces: Sequence[Piece]
    rank: int
    world_size: int
    keep: int | None
    timeout: float
    saving: Saving

    def run(self) -> None:
        try:
            self.write()
            if self.rank == 0:
                self.finish(self.collect())
        except Exception as error:  # it is raised by wait(), on every rank
            said = isinstance(error, OSError) and not error.errno
            self.saving._error = str(error) if said else f"{type(error).__name__}: {error}"
            with contextlib.suppress(OSError):
                (self.part / f"failed.{self.rank}").touch()

    def write(self) -> None:
        self.part.mkdir(parents=True, exist_ok=True)
        regions = write_pieces(self.part, self.rank, self.pieces, self.parts.items)
        items = {name: dataclasses.astuple(item) for name, item in self.parts.items.items()}
        mine = {"own": self.parts.own, "items": items, "regions": [dataclasses.astuple(region) for region in regions]}
        report = self.part / f"report.{self.rank}"
        unfinished = self.part / f".report.{self.rank}"
        unfinished.write_text(json.dumps(mine))
        os.rename(unfinished, report)

    def collect(self) -> list[dict[str, Any]]:
        """Wait for every rank's report."""
        end = time.monotonic() + self.timeout
        while True:
            names = set(os.listdir(self.part))
            missing = [rank for rank in range(self.world_size) if f"report.{rank}" not in names]
            if not missing:
                return [json.loads((self.part / f"report.{rank}").read_text()) for rank in range(self.world_size)]
            if failed := [rank for rank in missing if f"failed.{rank}" in names]:
                raise OSError(f"rank {failed[0]} could not write its part")
            if time.monotonic() > end or not threading.main_thread().is_alive():
                raise OSError(f"rank {missing[0]} has not written its part within {self.timeout:g} s")
            time.sleep(0.005)

    def finish(self, reports: list[dict[str, Any]]) -> None:
        items: dict[str, Item] = {}
        regions: list[Region] = []
        for report in reports:
            items |= {name: Item(tuple(shape), *rest) for name, (shape, *rest) in report["items"].items()}
            for name, begin, offsets, sizes, *rest in report["regions"]:
                regions.append(Region(name, begin, tuple(offsets), tuple(sizes), *rest))
        for rank in range(self.world_size):
            (self.part / f"report.{rank}").unlink()
        write_metadata(self.part, regions, items)
        write_index(self.part, self.plan, self.parts.outline, [report["own"] for report in reports], items, regions)
        publish(self.part, self.path)
        for left in leftovers(self.path):  # of attempts that were killed
            remove(left)
        if self.keep is not None:
            self.forget()

    def forget(self) -> None:
        complete = []
        for folder in folders(self.path.parent):
            with contextlib.suppress(OSError, ValueError):
                complete.append(read_contents(folder))
        for contents in sorted(complete, key=lambda each: each.saved)[: -self.keep or None]:  # type: ignore[operator]
            if contents.path != self.path and not contents.path.is_symlink():
                remove(contents.path)
        for left in self.path.parent.glob(".*.deleted.part"):  # by who was killed while it did the same
            remove(left)
        sync(self.path.parent)


def _thread_name(path: Path, rank: int) -> str:
    return f"save {path} as rank {rank}"


def _check_path(path: Path) -> None:
    if _thread_name(path, 0) in [
        thread.name for thread in threading.enumerate()
    ]:  # two would take each other's files for those of an attempt that was ended
        raise ValueError(f"a checkpoint is being saved to {path} already: pass what that save returned as after=")
    check_replaceable(path)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _digest(parts: Parts) -> str:
    return hashlib.sha256(json.dumps(facts(parts), sort_keys=True).encode()).hexdigest()


def _raise_together(mesh: Mesh, fault: Exception | None) -> None:
    """Raise on every rank what any of them found."""
    faults = all_gather_texts(mesh, json.dumps([type(fault).__name__, str(fault)] if fault else None))
    if fault is not None:
        raise fault
    for rank, text in enumerate(faults):
        if found := json.loads(text):
            kind = {"TypeError": TypeError, "FileNotFoundError": FileNotFoundError, "OSError": OSError}.get(
                found[0], ValueError
            )
            raise kind(f"{found[1]} (found on rank {rank})")
