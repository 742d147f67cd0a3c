"""``import_dcp``: a checkpoint of ``torch.distributed.checkpoint`` (DCP) to shards.

Each rank reads the chunks that overlap its part of a leaf, one after another. The metadata is a
pickle, which may call any function. So this reader looks up only dtypes, makes plain records of
DCP's metadata, and rejects every other name.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from funcshard._utils import file_data
from funcshard._utils.options import check_flag, check_path
from funcshard._utils.regular_files import open_regular, read_regular
from funcshard.checkpoint.folders import StrPath, what_it_holds
from funcshard.checkpoint.optimizer_loading import optimizer_from_state_dict
from funcshard.checkpoint.resharding import Run, copy_run, piece_of, run_in_shard, whole_run
from funcshard.checkpoint.state_dict import check_no_leaf, from_state_dict
from funcshard.checkpoint.stored_state import each_leaf, leaves_by_name, name_in
from funcshard.comm import Mesh, all_gather_texts
from funcshard.core import Shards, check_mesh, on_every_rank
from funcshard.plan import Box, BufferPlan, LeafSpec, Plan

_LARGEST = 4 << 30  # bytes of a .metadata

# Wrappers of torch put these into the names of parameters.
_WRAPPERS = re.compile(
    r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)

# Where torch has the classes of the metadata, and had some of them before.
_RECORDS = re.compile(
    r"torch\.distributed\.(checkpoint|_shard\.sharded_tensor)\.metadata\."
    r"(BytesStorageMetadata|ChunkStorageMetadata|Metadata|MetadataIndex|StorageMeta|TensorProperties"
    r"|TensorStorageMetadata|_?MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.filesystem\._StorageInfo|torch\.serialization\._get_layout"
    # Note: in Python 3.13 the classes of paths are in pathlib._local.
    r"|pathlib(\._local)?\.(Posix|Windows)Path"
)


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
    options_text = f"key={key!r}, cast={cast!r}, optimizer={optimizer is not None}"
    check_mesh(plan, mesh, {"the options of import_dcp": options_text})
    check_no_leaf(buffers, plan)
    leaf_values: dict[str, Any] = {}
    new_buffers: dict[str, torch.Tensor] = {}
    optimizer_state: dict[str, dict[str, Any]] = {}
    with on_every_rank(mesh):
        tensors, digest = _read_metadata(path)
        # Note: the tree of the parameters is found by their names, so no key has to be known.
        prefix = _prefix(tensors, plan, key, path)
        of_model = {
            n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)
        }
        for _, buffer, leaf in each_leaf(plan):
            name = name_in(of_model, leaf)
            assert name is not None, "the tree under the prefix is whole"
            leaf_values[leaf.path] = of_model[name].part(buffer, leaf, mesh)
        for name, old in (buffers or {}).items():
            new_buffers[name] = old
            if name in of_model:
                new_buffers[name] = of_model[name].whole().to(old.dtype).to(mesh.device)
        if optimizer is not None:
            optimizer_state = _optimizer_state(path, tensors, plan, mesh)
    # Note: each rank reads by itself, maybe from another disk.
    if len(set(all_gather_texts(mesh, digest))) > 1:
        raise ValueError(
            f"ranks found different checkpoints at {path}: give every rank the same files"
        )
    shards = from_state_dict(leaf_values, plan, mesh, cast=cast)
    if optimizer is None:
        return shards, new_buffers, None
    state_dict = {
        "state": optimizer_state,
        "param_groups": [{"params": list(optimizer_state)}],
    }
    opt_state = optimizer_from_state_dict(state_dict, optimizer, plan, mesh)
    return shards, new_buffers, opt_state


# --- names ----------------------------------------------------------------------------------------


def _prefix(
    stored: Mapping[str, _Tensor], plan: Plan, key: str | None, folder: Path
) -> str:
    """Return the words before the names of the parameters, such as ``"model."``."""
    if key is not None:
        starts = [f"{key}.".lstrip("."), f"{key}.module.".lstrip(".")]
    else:
        # Note: a prefix ends at any dot of a name, because paths of leaves have dots too.
        first_names = [name for leaf in plan.leaves[:1] for name in leaf.names]
        starts = sorted(
            {
                stored_name.removesuffix(name)
                for stored_name in stored
                for name in first_names
                if f".{stored_name}".endswith(f".{name}")
            }
        )
    missing_paths: dict[str, list[str]] = {}
    for start in starts or [""]:
        missing_paths[start] = [
            leaf.path
            for leaf in plan.leaves
            if not any(start + name in stored for name in leaf.names)
        ]
    # Note: of no whole tree, the error tells what the fullest one lacks.
    prefix = min(missing_paths, key=lambda start: len(missing_paths[start]))
    if missing_paths[prefix]:
        raise ValueError(
            f"{folder} must hold every leaf of the plan under {key or prefix.rstrip('.')!r}; missing: "
            f"{missing_paths[prefix][:3]}; it holds {sorted(stored)[:3]}: it is of another model"
        )
    whole_trees = [start.rstrip(".") for start in missing_paths if not missing_paths[start]]
    if len(whole_trees) > 1 and key is None:
        raise ValueError(
            f"{folder} holds the leaves of the plan under each of {whole_trees}: pass one of them "
            "as key"
        )
    return prefix


# --- tensors --------------------------------------------------------------------------------------


class _Tensor(NamedTuple):
    """A tensor of a DCP checkpoint.

    Attributes:
        chunks: where each box of it lies: a file, the first byte there, and the number of bytes.
    """

    folder: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: dict[Box, Any]

    def part(self, buffer: BufferPlan, leaf: LeafSpec, mesh: Mesh) -> Any:
        """Return this rank's piece of a tensor like a leaf, and any other tensor as a whole."""
        # Note: such as the count of steps, or a tensor of another model, which is an error later.
        if self.shape != leaf.whole_shape or not self.shape:
            return self.whole()
        _, run = run_in_shard(buffer, leaf, mesh.position)
        return piece_of(self.elements(run), run, leaf)

    def whole(self) -> torch.Tensor:
        return self.elements(whole_run(self.shape)).view(self.shape)

    def elements(self, target: Run) -> torch.Tensor:
        """Return the elements of a run, from the chunks that overlap it."""
        run_elements = torch.empty(target.numel, dtype=self.dtype, device="cpu")
        target_boxes, copied_numel = target.boxes(), 0
        for chunk_box, place in self.chunks.items():
            # Note: torch.load reads a chunk as a whole, so chunks of other ranks are not opened.
            if any(target_box.overlap(chunk_box) for target_box in target_boxes):
                source = Run(0, chunk_box.numel, chunk_box)
                values = self._load(place, chunk_box.sizes).reshape(-1)
                copied_numel += copy_run(run_elements, target, values, source)
        if copied_numel != target.numel:
            raise ValueError(
                f"{self.folder} is incomplete: it holds {copied_numel} of {target.numel} needed "
                f"elements of {self.name!r}"
            )
        return run_elements

    def _load(self, place: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the values of one chunk, which ``torch.save`` wrote."""
        file = self.folder / file_data.own_name(
            "a file of its metadata", place.relative_path
        )
        try:
            with open(open_regular(file, links=False), "rb") as opened:
                # Note: a file holds the chunks one after another, each an archive by itself.
                opened.seek(place.offset)
                archive = io.BytesIO(opened.read(place.length))
            values: torch.Tensor = torch.load(
                archive, map_location="cpu", weights_only=True
            )
            if (tuple(values.shape), values.dtype) != (shape, self.dtype):
                raise ValueError(f"found {tuple(values.shape)} and {values.dtype}")
        except FileNotFoundError:
            raise ValueError(
                f"{self.folder} is incomplete: {file.name} is missing"
            ) from None
        # Of any kind: readers of pickles and zip files raise what they meet.
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{file} is damaged: the bytes at {place.offset} aren't a tensor of {shape} and "
                f"{self.dtype}: {reason}"
            ) from error
        return values.detach()


def _optimizer_state(
    folder: Path, stored: Mapping[str, _Tensor], plan: Plan, mesh: Mesh
) -> dict[str, dict[str, Any]]:
    """Return this rank's pieces of the optimizer's state by path and key."""
    leaf_of = leaves_by_name(plan)
    state: dict[str, dict[str, Any]] = {}
    for name, tensor in stored.items():
        # Note: the key of the optimizer may be any, such as optim, and its state lies below it.
        path, _, entry_key = f".{name}".partition(".state.")[2].rpartition(".")
        if path in leaf_of:
            _, buffer, leaf = leaf_of[path]
            entries = state.setdefault(leaf.path, {})
            entries[entry_key] = tensor.part(buffer, leaf, mesh)
    if not state and any(buffer.trainable for _, buffer, _ in leaf_of.values()):
        raise ValueError(
            f"{folder} holds no optimizer state by name, such as "
            f"'optim.state.{plan.leaves[0].path}.exp_avg'; it holds {sorted(stored)[:3]}: leave "
            "optimizer out, and begin with optimizer.init(shards)"
        )
    return state


# --- the metadata ---------------------------------------------------------------------------------


def _read_metadata(folder: Path) -> tuple[dict[str, _Tensor], str]:
    """Return the tensors of a folder by name, and the digest of its metadata."""
    file = folder / ".metadata"
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no checkpoint at {folder}: there is no such folder"
        )
    if not file.exists():
        raise FileNotFoundError(
            f"there is no .metadata in {folder}: {what_it_holds(folder)}"
        )
    data, tensors = read_regular(file, most=_LARGEST, links=False), {}
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        # Note: a tensor that was stored as a whole may have no offset in its key.
        places = {
            (index.fqn, tuple(getattr(index, "offset", None) or ())): place
            for index, place in metadata.storage_data.items()
        }
        for title, stored in metadata.state_dict_metadata.items():
            if not hasattr(stored, "chunks"):  # a pickle that holds no tensor
                continue
            chunks = {}
            for chunk in stored.chunks:
                offsets = tuple(chunk.offsets)
                place = places.get((title, offsets)) or places[title, ()]
                chunks[Box(offsets, tuple(chunk.sizes))] = place
            name = _WRAPPERS.sub("", title)
            # Note: TensorProperties are pickled as a tuple, which begins with the dtype.
            dtype = stored.properties.state[0]
            tensors[name] = _Tensor(folder, name, tuple(stored.size), dtype, chunks)
    except Exception as error:  # of any kind: the reader of pickles raises what it meets
        raise ValueError(
            f"{file} is damaged, or is not the metadata of torch.distributed.checkpoint: {error}"
        ) from None
    return tensors, hashlib.sha256(data).hexdigest()


class _Record:
    """An object of DCP's metadata: its attributes, or ``state`` for a tuple."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        # Note: dataclasses pickle a dictionary, and TensorProperties a tuple.
        vars(self).update(state if isinstance(state, dict) else {"state": state})


def _member(record_type: Any, name: str) -> _Record:
    """Return a record of a member of an enumeration, which Python before 3.11.4 pickles so."""
    if not (isinstance(record_type, type) and issubclass(record_type, _Record)):
        raise ValueError(f"it asks for {name!r} of a {type(record_type).__name__}")
    return record_type()


_BUILTIN = {
    "torch.Size": tuple,
    "collections.OrderedDict": dict,
    "builtins.getattr": _member,
}


class _Unpickler(pickle.Unpickler):
    """Reads a pickle that names only DCP's metadata and dtypes, and runs no code of it."""

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        # Why vars: getattr could import a submodule.
        of_torch = vars(torch).get(name) if module == "torch" else None
        if isinstance(of_torch, torch.dtype):
            return of_torch
        if _RECORDS.fullmatch(full_name):
            # Note: a new class each time, because a pickle can set attributes of a class too.
            return type(name, (_Record,), {})
        if full_name in _BUILTIN:
            return _BUILTIN[full_name]
        raise ValueError(
            f"it names {full_name}, and a pickle could run that; nothing of it was run. If you "
            "trust the file, load it with torch.distributed.checkpoint.load, and pass the state "
            "dict to from_state_dict"
        )
