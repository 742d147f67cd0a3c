"""Parameters as safetensors files: one file, or several with an index as Hugging Face writes them.

Why not the library's writer: here rank 0 writes each flat buffer once it's gathered, so no rank
holds more than one of them in full.
"""

from __future__ import annotations

import glob
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from filelock import FileLock, Timeout

from funcshard._utils import file_data
from funcshard._utils.options import check_bytes, check_flag, check_path
from funcshard._utils.pages import release_pages
from funcshard._utils.regular_files import open_regular, read_regular
from funcshard._utils.tensors import byte_memory
from funcshard.checkpoint.every_rank import on_every_rank
from funcshard.checkpoint.folders import StrPath, sync
from funcshard.checkpoint.foreign_folders import what_it_holds
from funcshard.checkpoint.rank_files import CODE_OF, CODES, Header, header_bytes, headers_of
from funcshard.checkpoint.state_dict import (
    check_all_shards,
    check_no_leaf,
    find_leaves,
    find_local_leaf,
    leaves_for_this_rank,
)
from funcshard.checkpoint.stored_state import each_leaf
from funcshard.comm import Mesh, all_gather_texts
from funcshard.core import LeafChecksums, Shards, check_leaf, check_mesh, cut
from funcshard.plan import BufferPlan, Plan, UnitPlan, own_axes

# Number of bytes of each leaf that ranks compare.
COMPARED = 1 << 16

_LONGEST = 100_000_000  # bytes of a header or an index; other readers of the format take no more

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ENDINGS = (".safetensors", ".safetensors.index.json")
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

    You have to call it on every rank. Rank 0 writes one gathered flat buffer after another. A tied
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
        ValueError: ``max_shard_size`` is no size; the shards don't match the plan; a leaf is local
            to each rank; or the format lacks a dtype.
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
    path = check_path("path", path)
    most_bytes = check_bytes("max_shard_size", max_shard_size)
    check_floating("dtype", dtype)
    check_all_shards(shards, plan, mesh)
    check_no_leaf(buffers, plan)
    if (local_path := find_local_leaf(plan)) is not None:
        raise ValueError(
            f"leaf {local_path!r} is local to each rank, and a file would hold rank 0's alone; export "
            "shards under a plan in which no leaf is local"
        )
    file_entries = [
        Header(leaf.path, buffer.model_dtype, leaf.model_shape)
        for _, buffer, leaf in each_leaf(plan)
    ]
    extra_tensors = dict(buffers or {})
    for name, tensor in extra_tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"buffers must hold tensors; found {type(tensor).__name__} under {name!r}: leave "
                "it out"
            )
    file_entries += headers_of(extra_tensors)
    return write_tensors(
        path,
        file_entries,
        _full_tensors(shards, plan, mesh, extra_tensors),
        mesh,
        most_bytes,
        dtype,
    )


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
        # Note: its last dimension is halved in torch, and a scalar has none.
        if entry.dtype == torch.float4_e2m1fn_x2 and not entry.shape:
            raise ValueError(
                f"{entry.name!r} is a scalar of {entry.dtype}, which is two numbers in the file; "
                "give it a dimension"
            )
    is_single = path.suffix == ".safetensors"
    if is_single:
        folder, files = path.absolute().parent, {path.name: list(entries)}
    else:
        folder, files = path.absolute(), _split(entries, most)
    fault = ""
    if mesh.rank == 0:
        try:
            _write(folder, files, tensors, is_single)
        except Exception as error:  # of any kind, because other ranks wait
            fault = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    for _ in tensors:  # every rank takes part in every all-gather, even if rank 0 could not write
        pass
    # Note: no rank returns before rank 0 has written the files.
    fault = next(filter(None, all_gather_texts(mesh, fault)), "")
    if fault:
        raise OSError(f"cannot export to {path}: {fault}")
    return [folder / name for name in files]


def import_safetensors(path: StrPath, plan: Plan, mesh: Mesh, *, cast: bool = False) -> Shards:
    """Return this rank's shards of safetensors files; ``export_safetensors`` is the inverse.

    Each rank reads the bytes of its shards, and the first 64 KiB of each leaf, which ranks compare.

    Arguments:
        path: a safetensors file, or a folder as ``save_pretrained`` writes it. Names that are no
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
    with on_every_rank(mesh, checksums):
        leaf_tensors = find_leaves(
            open_tensors(path), plan.leaves, f"{path} must hold every leaf of the plan"
        )
        for _, buffer, leaf in each_leaf(plan):
            tensor = leaf_tensors[leaf.path]
            check_leaf(tensor, leaf, buffer, str(path), whole=True, cast=cast)
            # Note: only these bytes are compared, because a rank should read no others' parts.
            first_elements = tensor.view(-1)[: COMPARED // buffer.itemsize]
            checksums.add(leaf.path, first_elements, own_axes(buffer.local, leaf.cuts))
    shards: Shards = {}
    for unit in plan.unit_list:
        shards[unit.name] = cut(unit, leaf_tensors, mesh, str(path), whole=True, cast=cast)
        for leaf in unit.leaves:  # the bytes that were copied need not stay beside the copy
            release_pages(leaf_tensors[leaf.path])
    return shards


def check_floating(name: str, dtype: Any) -> None:
    """Raise ``TypeError`` unless an option is a floating-point dtype, or ``None``."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(
            f"{name} must be a floating-point dtype, such as torch.bfloat16, or None; found "
            f"{dtype!r}"
        )


# --- writing --------------------------------------------------------------------------------------


def full_leaves(
    shards: Shards, unit: UnitPlan, buffers: Sequence[BufferPlan], mesh: Mesh
) -> dict[str, torch.Tensor]:
    """Gather buffers of a unit, and return their leaves by path, on rank 0's CPU alone."""
    return {
        leaf.path: value
        for buffer in buffers
        for leaf, value in leaves_for_this_rank(
            shards[unit.name][buffer.key],
            unit,
            buffer,
            mesh,
            rank0_only=True,
            offload=True,
            sharded=False,
        )
    }


def _full_tensors(
    shards: Shards, plan: Plan, mesh: Mesh, extra: Mapping[str, torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Gather buffer after buffer; on rank 0, yield every leaf, then ``extra``."""
    for unit in plan.unit_list:
        for buffer in unit.buffers:
            yield from full_leaves(shards, unit, [buffer], mesh).values()
    if mesh.rank == 0:
        yield from extra.values()


def _write(
    folder: Path,
    files: Mapping[str, Sequence[Header]],
    tensors: Iterator[torch.Tensor],
    single: bool,
) -> None:
    """Write the files into a temporary folder, and rename them at the end, the index last."""
    folder.mkdir(parents=True, exist_ok=True)
    # Note: no other export writes into a folder of this name, even if a lock is lost.
    token = secrets.token_hex(4)
    name = next(iter(files)) if single else "safetensors"
    export_lock = FileLock(folder / f".{name}.lock", timeout=0.5)
    try:
        export_lock.acquire()
    except Timeout:
        raise OSError(
            "another export to it is running: wait for it, or choose another path"
        ) from None
    with ExitStack() as undo_stack:
        undo_stack.callback(export_lock.release)
        # First: a process that waits for the lock looks whether its file is still there.
        undo_stack.callback(Path(export_lock.lock_file).unlink, missing_ok=True)
        pattern = f".{glob.escape(name)}.{'[0-9a-f]' * 8}.part"
        for leftover in folder.glob(pattern):  # of exports that were killed
            shutil.rmtree(leftover, ignore_errors=True)
        # Note: files appear at their names when all of them are complete.
        part_folder = folder / f".{name}.{token}.part"
        part_folder.mkdir()
        undo_stack.callback(shutil.rmtree, part_folder, ignore_errors=True)
        # Note: by the token, a reader tells files of one export from those of another.
        export_token = {"export": token} if len(files) > 1 else {}
        for name, entries in files.items():
            with open(part_folder / name, "wb") as file:
                _write_one(file, entries, tensors, {"format": "pt", **export_token})
        written_names = [*files]
        if export_token:
            # Note: the index of Hugging Face, which other readers take too.
            places = [(entry, name) for name, entries in files.items() for entry in entries]
            index_data = {
                "metadata": {
                    "total_size": sum(entry.nbytes for entry, _ in places),
                    **export_token,
                },
                "weight_map": dict(sorted((entry.name, name) for entry, name in places)),
            }
            (part_folder / _INDEX).write_text(json.dumps(index_data, indent=2) + "\n")
            written_names.append(_INDEX)
            if any((folder / name).exists() for name in files):
                # Why first: no program finds an index beside files of two exports.
                (folder / _INDEX).unlink(missing_ok=True)
                sync(folder)
        for name in written_names:
            os.replace(part_folder / name, folder / name)
        if not single:
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
    metadata: Mapping[str, str],
) -> None:
    file.write(header_bytes(entries, metadata))
    for entry in entries:
        # Note: one tensor at a time is on the CPU, in the dtype of the file.
        tensor = next(tensors).detach().cpu().to(entry.dtype).contiguous()
        if entry.nbytes:
            file.write(byte_memory(tensor))
    file.flush()
    os.fsync(file.fileno())


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


def open_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files at a path, as views of mapped pages.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: a file is damaged.
    """
    tensors_by_name: dict[str, torch.Tensor] = {}
    file_paths, export_token = _files(path)
    for file in file_paths:
        file_tensors = _open(file, export_token)
        if double_names := tensors_by_name.keys() & file_tensors.keys():
            raise ValueError(
                f"{file} holds {min(double_names)!r}, as another file beside it does: export them again"
            )
        tensors_by_name |= file_tensors
    return tensors_by_name


def _open(file: Path, token: str | None) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, as views of mapped pages.

    Arguments:
        file: the file.
        token: the token in the index that names the file, if any.
    """
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
    except (SafetensorError, OSError) as error:  # some files of /proc are regular and have no pages
        raise ValueError(f"{file} is damaged, or is not a safetensors file: {error}") from None
    # Note: an index of another program has no token, and is trusted.
    if token is not None and (mapped_file.metadata() or {}).get("export") != token:
        raise ValueError(
            f"{file} is of another export than {_INDEX} beside it: the export into that folder was "
            "interrupted, or is running, or the file was replaced; export again, or remove "
            "'export' from the index if they belong together"
        )
    # A tensor of a dtype that torch lacks counts as missing if the plan has this leaf.
    return {
        name: mapped_file.get_tensor(name)
        for name in sorted(mapped_file.keys())
        if mapped_file.get_slice(name).get_dtype() in CODES
    }


def _files(path: Path) -> tuple[list[Path], str | None]:
    """Return the files to read, and the token of an export of several."""
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"there is no safetensors file at {path}")
        return [path], None
    index_file, single_file = path / _INDEX, path / _SINGLE
    if index_file.exists():
        try:
            index_data = file_data.table(
                "the index",
                file_data.parse(read_regular(index_file, most=_LONGEST)),
                ("weight_map",),
            )
            file_entries = file_data.table("weight_map", index_data["weight_map"]).values()
            file_names = sorted(
                {file_data.text("a file of weight_map", name) for name in file_entries}
            )
        except ValueError as error:
            raise ValueError(
                f"{index_file} is damaged: it is not JSON with a 'weight_map' of names and files "
                f"({error})"
            ) from None
        # Note: a name with folders could lead out of this one.
        if missing_files := [
            name for name in file_names if Path(name).name != name or not (path / name).exists()
        ]:
            raise ValueError(
                f"{index_file} names the file {missing_files[0]!r}, which is not beside it"
            )
        metadata = index_data.get("metadata")
        return [path / name for name in file_names], metadata.get("export") if isinstance(
            metadata, dict
        ) else None
    if not single_file.exists():
        cut_short = any(path.glob(_NUMBERED))
        hint = (
            "an export into it was interrupted; export again" if cut_short else what_it_holds(path)
        )
        raise FileNotFoundError(f"there is neither {_SINGLE} nor {_INDEX} in {path}: {hint}")
    return [single_file], None
