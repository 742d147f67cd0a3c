"""``import_dcp``: a checkpoint of ``torch.distributed.checkpoint`` (DCP) to shards.

Each rank reads the chunks that overlap its part of a leaf, one after another, so it holds its
shards and one chunk.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from funcshard._utils.options import check_flag, check_path
from funcshard._utils.regular_files import open_regular, read_regular
from funcshard.checkpoint.dcp_metadata import METADATA, Chunk, StoredTensor, read_metadata
from funcshard.checkpoint.every_rank import on_every_rank
from funcshard.checkpoint.folders import StrPath, has_our_index
from funcshard.checkpoint.foreign_folders import foreign_remedy
from funcshard.checkpoint.optimizer_loading import optimizer_from_state_dict
from funcshard.checkpoint.pieces import piece_of
from funcshard.checkpoint.resharding import Run, copy_run, run_in_shard, whole_run
from funcshard.checkpoint.stored_state import by_buffer, each_leaf
from funcshard.comm import Mesh, all_gather_texts
from funcshard.core import Shards, can_cast, check_mesh, empty_shard
from funcshard.plan import BufferPlan, LeafSpec, Plan, dtype_of

_LARGEST = 4 << 30  # bytes of a .metadata

# Wrappers of torch put these into the names of parameters.
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def import_dcp(
    path: StrPath,
    plan: Plan,
    mesh: Mesh,
    *,
    buffers: Mapping[str, torch.Tensor] | None = None,
    optimizer: Any = None,
    key: str | None = None,
    cast: bool = False,
) -> tuple[Shards, dict[str, torch.Tensor], Any]:
    """Return this rank's shards of a checkpoint that FSDP2 or DDP saved with DCP.

    You have to call it on every rank. It may be saved on any number of ranks, with state dicts from
    ``get_state_dict`` or ``module.state_dict()``. No code of the checkpoint runs.

    Arguments:
        path: the checkpoint's folder.
        plan: your plan, to cut the shards by.
        mesh: the ranks.
        buffers: your buffers, to replace by those that the checkpoint holds.
        optimizer: your optimizer, whose state to read, as in ``optimizer_from_state_dict``; the
            checkpoint's options, such as the learning rate, are ignored.
        key: the key of the parameters' state dict, such as ``"model"``. By default their names find
            it.
        cast: as in ``from_state_dict``.

    Returns:
        ``(shards, buffers, opt_state)``, where ``opt_state`` is ``None`` without an ``optimizer``.

    Raises:
        FileNotFoundError: there is no such folder, or no ``.metadata`` in it.
        TypeError: an option has the wrong type.
        ValueError: the checkpoint is damaged; it lacks a leaf, or has several trees with all
            leaves; a tensor has another shape or dtype than planned; or ranks find different
            checkpoints. If one rank fails, every rank raises.

    Example:
        >>> import tempfile, warnings, torch, funcshard as fs
        >>> import torch.distributed.checkpoint as dcp
        >>> warnings.simplefilter("ignore")  # it warns of one process
        >>> net = torch.nn.Linear(2, 1)
        >>> apply, params, _ = fs.make_functional(net)
        >>> def main(mesh, folder):
        ...     plan = fs.make_plan(params, mesh)
        ...     shards, buffers, opt_state = fs.import_dcp(folder, plan, mesh)
        ...     return fs.gather(shards, plan, mesh)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = dcp.save({"model": net.state_dict()}, checkpoint_id=folder, no_dist=True)
        ...     loaded = fs.simulate(lambda mesh: main(mesh, folder), world_size=2)[0]
        >>> torch.equal(loaded["weight"], net.weight)
        True

    Source: ``torch.distributed.checkpoint.load``.
    """
    path = check_path("path", path)
    check_flag("cast", cast)
    if key is not None and not isinstance(key, str):
        raise TypeError(
            f"key must be the key of a state dict in the checkpoint, or None; found {key!r}"
        )
    if buffers is not None and not isinstance(buffers, Mapping):
        raise TypeError(
            f"buffers must be a dictionary {{name: tensor}}, or None; found "
            f"{type(buffers).__name__}"
        )
    options_text = f"key={key!r}, cast={cast!r}, optimizer={optimizer is not None}"
    check_mesh(plan, mesh, {"the options of import_dcp": options_text})
    digest = ""
    new_buffers: dict[str, torch.Tensor] = {}
    optimizer_state: dict[str, dict[str, Any]] = {}
    with on_every_rank(mesh):
        metadata_bytes = _metadata(path)
        digest = hashlib.sha256(metadata_bytes).hexdigest()
        stored_tensors = {
            _WRAPPERS.sub("", name): tensor
            for name, tensor in read_metadata(metadata_bytes, path).items()
        }
        # Note: the tree of the parameters is found by their names, so no key has to be known.
        name_prefix = _prefix(stored_tensors, plan, key, path)
        shards = by_buffer(plan, lambda unit, buffer: empty_shard(unit, buffer, mesh))
        for unit, buffer, leaf in each_leaf(plan):
            leaf_names = [name_prefix + name for name in (leaf.path, *leaf.aliases)]
            stored_tensor = next(
                stored_tensors[name] for name in leaf_names if name in stored_tensors
            )
            _check(stored_tensor, leaf, buffer, path, cast)
            in_shard, target = run_in_shard(buffer, leaf, mesh.position)
            _read_run(
                shards[unit.name][buffer.key][in_shard], target, path, stored_tensor, leaf.path
            )
        for name, old in (buffers or {}).items():
            new_buffers[name] = old
            if name_prefix + name in stored_tensors:
                whole_buffer = _read_whole(path, stored_tensors[name_prefix + name], name)
                new_buffers[name] = whole_buffer.to(old.dtype).to(mesh.device)
        if optimizer is not None:
            optimizer_state = _optimizer_state(path, stored_tensors, plan, mesh)
    # Note: each rank reads by itself, maybe from another disk.
    if len(set(all_gather_texts(mesh, digest))) > 1:
        raise ValueError(
            f"ranks found different checkpoints at {path}: give every rank the same files"
        )
    if optimizer is None:
        return shards, new_buffers, None
    state_dict = {"state": optimizer_state, "param_groups": [{"params": list(optimizer_state)}]}
    opt_state = optimizer_from_state_dict(state_dict, optimizer, plan, mesh)
    return shards, new_buffers, opt_state


def _metadata(folder: Path) -> bytes:
    file = folder / METADATA
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no checkpoint at {folder}: there is no such folder")
    if not file.exists():
        remedy = "it is incomplete, or no checkpoint of torch.distributed.checkpoint"
        if has_our_index(folder):
            remedy = "save wrote this checkpoint: restore(path, plan, mesh) reads it"
        elif foreign_text := foreign_remedy(folder):
            remedy = foreign_text
        raise FileNotFoundError(f"there is no {METADATA} in {folder}: {remedy}")
    return read_regular(file, most=_LARGEST, links=False)


# --- names ----------------------------------------------------------------------------------------


def _prefix(stored: Mapping[str, StoredTensor], plan: Plan, key: str | None, folder: Path) -> str:
    """Return the words before the names of the parameters, such as ``"model."``."""
    path_of, planned_paths = _paths_by_name(plan), [leaf.path for leaf in plan.leaves]
    held_paths: dict[str, set[str]] = {} if planned_paths else {"": set()}
    for name in stored:
        # Note: a prefix ends at any dot of the name, because paths of leaves have dots too.
        for begin in [0, *(dot.end() for dot in re.finditer(r"\.", name))]:
            if name[begin:] in path_of:
                held_paths.setdefault(name[:begin], set()).add(path_of[name[begin:]])
    if key is not None:
        allowed_starts = {f"{key}.".lstrip("."), f"{key}.module.".lstrip(".")}
        held_paths = {start: held_paths[start] for start in held_paths.keys() & allowed_starts}
    whole_starts = sorted(s for s in held_paths if len(held_paths[s]) == len(planned_paths))
    if len(whole_starts) == 1:
        return whole_starts[0]
    if whole_starts:
        raise ValueError(
            f"{folder} holds the leaves of the plan under each of "
            f"{[start.rstrip('.') for start in whole_starts]}: pass one of them as key"
        )
    # Note: of no whole tree, the error tells what the fullest one lacks.
    start = max(sorted(held_paths), key=lambda start: len(held_paths[start]), default="")
    missing_paths = [path for path in planned_paths if path not in held_paths.get(start, ())]
    prefix = start.rstrip(".") if start else key
    under_text = "" if prefix is None else f" under {prefix!r}"
    raise ValueError(
        f"{folder} must hold every leaf of the plan{under_text}; missing: {missing_paths[:3]}; it "
        f"holds {sorted(stored)[:3]}: it is of another model"
    )


def _paths_by_name(plan: Plan) -> dict[str, str]:
    """Return the path of each leaf by all of its names."""
    return {name: leaf.path for leaf in plan.leaves for name in (leaf.path, *leaf.aliases)}


def _check(
    tensor: StoredTensor, leaf: LeafSpec, buffer: BufferPlan, folder: Path, cast: bool
) -> None:
    if buffer.packing is not None:
        raise ValueError(
            f"import_dcp reads leaves as they are, and the plan packs {leaf.path!r}; found storage "
            f"{buffer.packing.name!r}: import under a plan without storage, and take to_state_dict "
            "and from_state_dict"
        )
    planned_dtype = dtype_of(buffer.dtype)
    dtype_fits = tensor.dtype == planned_dtype or (cast and can_cast(tensor.dtype, planned_dtype))
    if tensor.shape != leaf.whole_shape or not dtype_fits:
        remedy = "it is of another model"
        if tensor.shape == leaf.whole_shape and can_cast(tensor.dtype, planned_dtype):
            remedy = "pass cast=True to convert it"
        raise ValueError(
            f"leaf {leaf.path!r} of {folder} must have shape {leaf.whole_shape} and dtype "
            f"{buffer.dtype}, as planned; found {tensor.shape} and "
            f"{str(tensor.dtype).removeprefix('torch.')}: {remedy}"
        )


# --- tensors --------------------------------------------------------------------------------------


def _read_run(
    out: torch.Tensor, target: Run, folder: Path, tensor: StoredTensor, name: str
) -> None:
    """Fill ``out``, a run of a leaf, from the chunks that overlap it."""
    target_boxes, copied_numel = target.boxes(), 0
    for chunk in tensor.chunks:
        # Note: torch.load reads a chunk as a whole, so chunks of other ranks are not opened.
        if any(box.overlap(chunk.box) for box in target_boxes):
            chunk_values = _load(folder, chunk, tensor).reshape(-1)
            copied_numel += copy_run(
                out, target, chunk_values, Run(0, chunk_values.numel(), chunk.box)
            )
    if copied_numel != target.numel:
        raise ValueError(
            f"{folder} holds {copied_numel} of {target.numel} needed elements of {name!r}: it is "
            "incomplete"
        )


def _read_whole(folder: Path, tensor: StoredTensor, name: str) -> torch.Tensor:
    whole_tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    _read_run(whole_tensor.view(-1), whole_run(tensor.shape), folder, tensor, name)
    return whole_tensor


def _load(folder: Path, chunk: Chunk, tensor: StoredTensor) -> torch.Tensor:
    """Return the values of one chunk, which ``torch.save`` wrote."""
    file = folder / chunk.file
    damage_text = f"{file} is damaged: the bytes at {chunk.offset} are not as its metadata says"
    try:
        with open(open_regular(file, links=False), "rb") as opened:
            # Note: a file holds the chunks one after another, each an archive by itself.
            window = io.BufferedReader(_Window(opened, chunk.offset, chunk.length))
            loaded_tensor = torch.load(window, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{folder} is incomplete: {chunk.file} is missing") from None
    except Exception as error:  # of any kind: readers of pickles and zip files raise what they meet
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{damage_text}: they are no tensor that torch.save wrote: {reason}"
        ) from error
    is_tensor = type(loaded_tensor) in (torch.Tensor, torch.nn.Parameter)
    if not is_tensor or loaded_tensor.layout != torch.strided or loaded_tensor.device.type != "cpu":
        raise ValueError(
            f"{damage_text}: found a {type(loaded_tensor).__name__} in place of a dense tensor"
        )
    shape, dtype = tuple(loaded_tensor.shape), loaded_tensor.dtype
    if (shape, dtype) != (chunk.box.sizes, tensor.dtype):
        raise ValueError(
            f"{damage_text}: found {shape} and {dtype} in place of {chunk.box.sizes} and {tensor.dtype}"
        )
    return loaded_tensor.detach()


class _Window(io.RawIOBase):
    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self.file, self.offset, self.length, self.position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        # Note: ``whence`` counts from the start, the position or the end.
        self.position = offset + (0, self.position, self.length)[whence]
        return self.position

    def readinto(self, out: Any) -> int:
        self.file.seek(self.offset + self.position)
        size = max(0, min(len(out), self.length - self.position))
        count = self.file.readinto(memoryview(out)[:size])
        self.position += count
        return count


def _optimizer_state(
    folder: Path, stored: Mapping[str, StoredTensor], plan: Plan, mesh: Mesh
) -> dict[str, dict[str, Any]]:
    """Return this rank's pieces of the optimizer's state by path and key."""
    names_by_path: dict[str, dict[str, str]] = {}
    path_of = _paths_by_name(plan)
    for name in stored:
        # Note: the key of the optimizer may be any, such as optim, and its state lies below it.
        entry_name = f".{name}".partition(".state.")[2]
        path, _, entry_key = entry_name.rpartition(".")
        if path in path_of:
            names_by_path.setdefault(path_of[path], {})[entry_key] = name
    state: dict[str, dict[str, Any]] = {}
    for _, buffer, leaf in each_leaf(plan):
        for entry_key, name in names_by_path.get(leaf.path, {}).items():
            stored_tensor = stored[name]
            # Note: scalars, such as step, are read as a whole.
            if stored_tensor.shape != leaf.whole_shape or not stored_tensor.shape:
                state.setdefault(leaf.path, {})[entry_key] = _read_whole(
                    folder, stored_tensor, name
                )
                continue
            _, own_run = run_in_shard(buffer, leaf, mesh.position)
            run_elements = torch.empty(own_run.numel, dtype=stored_tensor.dtype, device="cpu")
            _read_run(run_elements, own_run, folder, stored_tensor, leaf.path)
            state.setdefault(leaf.path, {})[entry_key] = piece_of(run_elements, own_run, leaf)
    if not state and any(buffer.trainable for _, buffer, _ in each_leaf(plan)):
        raise ValueError(
            f"{folder} holds no optimizer state by name, such as "
            f"'optim.state.{plan.leaves[0].path}.exp_avg'; it holds {sorted(stored)[:3]}: leave "
            "optimizer out, and begin with optimizer.init(shards)"
        )
    return state
