"""Parameters as safetensors files: one file, or several with an index as Hugging Face writes them.

Why not the library's writer: here rank 0 writes each unit once it's gathered, so no rank holds more
than one of them in full.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import torch
from filelock import FileLock, Timeout
from torch import nn

from funcshard._utils import file_data
from funcshard._utils.options import check_bytes, check_flag, check_path
from funcshard._utils.regular_files import open_regular, read_regular, release_pages
from funcshard._utils.tensors import byte_memory
from funcshard.checkpoint.folders import StrPath, sync, what_it_holds
from funcshard.checkpoint.hugging_face import stored, stored_entries
from funcshard.checkpoint.rank_files import (
    CODE_OF,
    CODES,
    Header,
    header_bytes,
    headers_of,
    sync_file,
)
from funcshard.checkpoint.state_dict import (
    Delivery,
    check_all_shards,
    check_floating,
    check_no_leaf,
    check_no_local_leaf,
    find_leaves,
)
from funcshard.checkpoint.stored_state import Tensors, each_leaf
from funcshard.comm import Mesh
from funcshard.core import (
    LeafChecksums,
    Shards,
    check_mesh,
    cut,
    on_every_rank,
    raise_on_every_rank,
)
from funcshard.plan import Plan

# Number of bytes of each leaf that ranks compare.
COMPARED = 1 << 16

_LONGEST = (
    100_000_000  # bytes of a header or an index; other readers of the format take no more
)

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_NUMBERED = f"model-{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors"


def export_safetensors(
    path: StrPath,
    shards: Shards,
    plan: Plan,
    mesh: Mesh,
    *,
    buffers: Mapping[str, torch.Tensor] | None = None,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Write the full parameters into safetensors files; ``import_safetensors`` is the inverse.

    You have to call it on every rank. Rank 0 writes one gathered unit after another. A tied
    parameter is written once, under its first name.

    Arguments:
        path: a file that ends in ``.safetensors``, or a folder, which gets one
            ``model.safetensors``, or several files with an index. ``AutoModel.from_pretrained``
            loads it with a ``config.json``. Earlier exports are replaced.
        shards: this rank's shards.
        plan: the plan of your shards.
        mesh: the ranks.
        buffers: further tensors to write, such as ``apply.persistent(buffers)``.
        max_shard_size: the most bytes in one of several files, as a number or as ``"500MB"``.
        dtype: dtype of all floating-point tensors in the files, such as ``torch.bfloat16``; by
            default their own.

    Returns:
        The paths of the files that hold tensors, on every rank.

    Raises:
        TypeError: ``max_shard_size`` is neither a number nor text, or ``dtype`` isn't
            floating-point.
        ValueError: ``max_shard_size`` isn't a size; the shards don't match the plan; a leaf is
            local to each rank; or the format lacks a dtype.
        OSError: rank 0 can't write the files, or another export to ``path`` is running. Every rank
            raises it.

    Example:
        >>> import tempfile, torch, funcshard as fs
        >>> params = {"w": torch.arange(4.0)}
        >>> def main(mesh, folder):
        ...     plan = fs.make_plan(params, mesh)
        ...     file = f"{folder}/w.safetensors"
        ...     fs.export_safetensors(file, fs.shard(params, plan, mesh), plan, mesh)
        ...     return fs.import_safetensors(file, plan, mesh)[""]["float32"].tolist()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fs.simulate(lambda mesh: main(mesh, folder), world_size=2)
        [[0.0, 1.0], [2.0, 3.0]]
    """
    return export_model(None, path, shards, plan, mesh, buffers, max_shard_size, dtype)


def export_model(
    module: nn.Module | None,
    path: StrPath,
    shards: Shards,
    plan: Plan,
    mesh: Mesh,
    buffers: Mapping[str, torch.Tensor] | None,
    max_shard_size: int | str,
    dtype: torch.dtype | None,
) -> list[Path]:
    """Write full parameters as files of ``module``, or under the plan's names without one."""
    path = check_path("path", path)
    most_bytes = check_bytes("max_shard_size", max_shard_size)
    check_floating("dtype", dtype)
    check_all_shards(shards, plan, mesh)
    check_no_local_leaf(plan)
    check_no_leaf(buffers, plan)
    extra_tensors = buffers or {}
    for name, tensor in extra_tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"buffers must hold tensors; found {type(tensor).__name__} under {name!r}: leave "
                "it out"
            )
    entry_groups = stored_entries(module, plan)
    delivery = Delivery(mesh, rank0_only=True, offload=True)

    def tensors() -> Iterator[torch.Tensor]:
        for unit, unit_entries in zip(plan.unit_list, entry_groups, strict=True):
            # Note: on rank 0's CPU alone.
            unit_leaves = {
                leaf.path: value
                for buffer in unit.buffers
                for leaf, value in delivery.leaves(
                    shards[unit.name][buffer.key], unit, buffer
                )
            }
            if mesh.rank == 0:
                # Note: experts, for example, are one leaf, and several tensors in files.
                stored_tensors = stored(module, unit_leaves)
                del unit_leaves
                for entry in unit_entries:
                    yield stored_tensors.pop(entry.name)
        if mesh.rank == 0:
            yield from extra_tensors.values()

    file_entries = [*itertools.chain(*entry_groups), *headers_of(extra_tensors)]
    return write_tensors(path, file_entries, tensors(), mesh, most_bytes, dtype)


def write_tensors(
    path: Path,
    entries: Sequence[Header],
    tensors: Iterator[torch.Tensor],
    mesh: Mesh,
    most: int,
    dtype: torch.dtype | None,
) -> list[Path]:
    """Write the tensors that rank 0 yields into files, and return their paths on every rank.

    Arguments:
        path: a file or a folder; see ``export_safetensors``.
        entries: the tensors, in the order of ``tensors``.
        tensors: an iterator that communicates, and yields on rank 0 only.
        mesh: the ranks.
        most: the most bytes in one of several files.
        dtype: floating-point dtype of the files, or ``None``.
    """
    if dtype is not None:
        entries = [
            entry._replace(dtype=dtype) if entry.dtype.is_floating_point else entry
            for entry in entries
        ]
    for entry in entries:
        if entry.dtype not in CODE_OF:
            raise ValueError(
                f"{entry.name!r} is of {entry.dtype}, which safetensors files cannot hold; convert "
                "it first"
            )
    folder, is_single = path.absolute(), path.suffix == ".safetensors"
    files: Mapping[str, Sequence[Header]] = _split(entries, most)
    if is_single:
        folder, files = folder.parent, {path.name: entries}
    fault: Exception | None = None
    if mesh.rank == 0:
        try:
            _write(folder, files, tensors, is_single)
        except Exception as error:  # of any kind, because other ranks wait
            fault = OSError(f"cannot export to {path}: {type(error).__name__}: {error}")
    for _ in (
        tensors
    ):  # every rank takes part in every all-gather, even if rank 0 could not write
        pass
    # Note: no rank returns before rank 0 has written the files.
    raise_on_every_rank(mesh, fault)
    return [folder / name for name in files]


def import_safetensors(
    path: StrPath, plan: Plan, mesh: Mesh, *, cast: bool = False
) -> Shards:
    """Return this rank's shards of safetensors files; ``export_safetensors`` is the inverse.

    Each rank reads the bytes of its shards, and the first 64 KiB of each leaf, which ranks compare.

    Arguments:
        path: a safetensors file, or a folder as ``save_pretrained`` writes it. Names that aren't
            leaves are ignored. A tied parameter may be under any of its names.
        plan: your plan, to cut the shards by.
        mesh: the ranks.
        cast: as in ``from_state_dict``.

    Returns:
        Shards; see ``shard``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is damaged, a leaf is missing, a tensor has another shape or dtype than
            planned, or ranks find different files. If one rank fails, every rank raises.

    Example:
        >>> import tempfile, torch, funcshard as fs
        >>> params = {"w": torch.arange(3.0)}
        >>> plan, mesh = fs.make_plan(params, 1), fs.Mesh()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = fs.export_safetensors(folder, fs.shard(params, plan, mesh), plan, mesh)
        ...     fs.import_safetensors(folder, plan, mesh)
        {'': {'float32': tensor([0., 1., 2.])}}
    """
    path = check_path("path", path)
    check_flag("cast", cast)
    check_mesh(plan, mesh, {"the options of import_safetensors": f"cast={cast!r}"})
    checksums = LeafChecksums(mesh, str(path), "give every rank the same files")
    shards: Shards = {}
    with on_every_rank(mesh, checksums):
        leaf_tensors = find_leaves(
            open_tensors(path), plan.leaves, f"{path} must hold every leaf of the plan"
        )
        for unit in plan.unit_list:
            shards[unit.name] = cut(
                unit, leaf_tensors, mesh, str(path), whole=True, cast=cast
            )
        for _, buffer, leaf in each_leaf(plan):
            tensor = leaf_tensors[leaf.path]
            # Note: only these bytes are compared, because a rank should read no others' parts.
            first_elements = tensor.view(-1)[: COMPARED // buffer.itemsize]
            checksums.add(leaf.path, first_elements, buffer.own_axes(leaf))
            release_pages(
                tensor
            )  # the bytes that were copied need not stay beside the copy
    return shards


# --- writing --------------------------------------------------------------------------------------


def _write(
    folder: Path,
    files: Mapping[str, Sequence[Header]],
    tensors: Iterator[torch.Tensor],
    is_single: bool,
) -> None:
    """Write the files into a temporary folder, and rename them at the end, the index last."""
    folder.mkdir(parents=True, exist_ok=True)
    title = next(iter(files)) if is_single else "safetensors"
    # Why inside the folder: os.replace works within one file system only.
    part_folder, export_lock = (
        folder / f".{title}.part",
        FileLock(folder / f".{title}.lock"),
    )
    try:
        export_lock.acquire(timeout=0.5)
    except Timeout:
        raise OSError(
            "another export to it is running: wait for it, or choose another path"
        ) from None
    with ExitStack() as undo_stack:
        undo_stack.callback(export_lock.release)
        # First: a process that waits for the lock looks whether its file is still there.
        undo_stack.callback(Path(export_lock.lock_file).unlink, missing_ok=True)
        shutil.rmtree(part_folder, ignore_errors=True)  # of an export that was killed
        # Note: files appear at their names when all of them are complete.
        part_folder.mkdir()
        undo_stack.callback(shutil.rmtree, part_folder, ignore_errors=True)
        for name, entries in files.items():
            with open(part_folder / name, "wb") as file:
                _write_one(file, entries, tensors)
        written_names = [*files]
        if len(files) > 1:
            # Note: the index of Hugging Face, which other readers take too.
            places = [(entry, name) for name, entries in files.items() for entry in entries]
            index_data = {
                "metadata": {"total_size": sum(entry.nbytes for entry, _ in places)},
                "weight_map": dict(sorted((entry.name, name) for entry, name in places)),
            }
            (part_folder / _INDEX).write_text(json.dumps(index_data, indent=2) + "\n")
            written_names.append(_INDEX)
            # Why first: no program finds an index beside files of two exports.
            (folder / _INDEX).unlink(missing_ok=True)
            # Why: after a crash of the host, the old index could be back beside new files.
            sync(folder)
        for name in written_names:
            os.replace(part_folder / name, folder / name)
        if not is_single:
            # Note: after an export of fewer files, the old ones would be read as parts of it.
            # The index goes first, because no program may find it without its files.
            old_names = [_INDEX, _SINGLE, *(file.name for file in folder.glob(_NUMBERED))]
            for name in old_names:
                if name not in written_names:
                    (folder / name).unlink(missing_ok=True)
        sync(folder)


def _write_one(
    file: BinaryIO,
    entries: Sequence[Header],
    tensors: Iterator[torch.Tensor],
) -> None:
    file.write(header_bytes(entries, {"format": "pt"}))
    for entry in entries:
        # Note: one tensor at a time is on the CPU, in the dtype of the file.
        tensor = next(tensors).detach().cpu().to(entry.dtype).contiguous()
        if entry.nbytes:
            file.write(byte_memory(tensor))
    sync_file(file)


def _split(entries: Sequence[Header], most: int) -> dict[str, list[Header]]:
    """Return the tensors of each file, at most ``most`` bytes or one tensor."""
    entry_groups: list[list[Header]] = [[]]
    group_bytes = 0
    for entry in entries:
        # Note: a larger tensor is alone in its file.
        if entry_groups[-1] and group_bytes + entry.nbytes > most:
            entry_groups.append([])
            group_bytes = 0
        entry_groups[-1].append(entry)
        group_bytes += entry.nbytes
    if len(entry_groups) == 1:
        return {_SINGLE: entry_groups[0]}
    ending = f"of-{len(entry_groups):05}.safetensors"
    return {f"model-{i:05}-{ending}": group for i, group in enumerate(entry_groups, 1)}


# --- reading --------------------------------------------------------------------------------------


def open_tensors(path: Path) -> Tensors:
    """Return the tensors of all files at a path, as views of mapped pages.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: a file is damaged.
    """
    tensors_by_name: Tensors = {}
    for file in _files(path):
        tensors_by_name |= _open(file)
    return tensors_by_name


def _open(file: Path) -> Tensors:
    """Return the tensors of a file, as views of mapped pages."""
    # Note: only here, so that a machine without this package can train.
    from safetensors import SafetensorError, safe_open

    with open(open_regular(file), "rb") as opened:
        # Note: a clone without git-lfs has such a text of some lines in place of each file.
        if opened.read(8) == b"version ":
            raise ValueError(
                f"{file} is a pointer of Git LFS, and not the file itself: run git lfs pull in its "
                "folder"
            )
    try:
        mapped_file = safe_open(file, "pt")
    except (
        SafetensorError,
        OSError,
    ) as error:  # some files of /proc are regular and have no pages
        raise ValueError(
            f"{file} is damaged, or is not a safetensors file: {error}"
        ) from None
    # A tensor of a dtype that torch lacks counts as missing if the plan has this leaf.
    return {
        name: mapped_file.get_tensor(name)
        for name in sorted(mapped_file.keys())
        if mapped_file.get_slice(name).get_dtype() in CODES
    }


def _files(path: Path) -> list[Path]:
    """Return the files to read."""
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"there is no safetensors file at {path}")
        return [path]
    index_file, single_file = path / _INDEX, path / _SINGLE
    if index_file.exists():
        try:
            index_data = file_data.parse(read_regular(index_file, most=_LONGEST))
            # Note: a name with folders could lead out of this one.
            file_names = {
                file_data.own_name(f"the file of {name!r}", file_name)
                for name, file_name in index_data["weight_map"].items()
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{index_file} is damaged: it is not JSON with a 'weight_map' of names and files "
                f"({error})"
            ) from None
        return [path / name for name in sorted(file_names)]
    if not single_file.exists():
        cut_short = any(path.glob(_NUMBERED))
        hint = (
            "an export into it was interrupted; export again"
            if cut_short
            else what_it_holds(path)
        )
        raise FileNotFoundError(
            f"there is neither {_SINGLE} nor {_INDEX} in {path}: {hint}"
        )
    return [single_file]
