"""Checkpoints of ``save`` to the files of other programs: ``export_dcp``, and safetensors files.

One process converts a checkpoint of any number of ranks, one whole leaf after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from funcshard._utils.options import check_path
from funcshard.checkpoint.contents import Contents, Watch, read_contents, unwatched
from funcshard.checkpoint.folders import StrPath
from funcshard.checkpoint.hugging_face import build_on_meta, stored, write_config
from funcshard.checkpoint.rank_files import Header, RankReader, headers_of
from funcshard.checkpoint.resharding import (
    Source,
    leaf_sources,
    read_run,
    turn_of,
    whole_run,
)
from funcshard.checkpoint.safetensors import write_tensors
from funcshard.checkpoint.stored_state import any_plan, shard_buffers
from funcshard.comm import Mesh
from funcshard.plan import Packing, dtype_of, position_of

# The names of torch's get_state_dict for the trees of a TrainState, by the ends of their names.
_TREES = {"shards": "model", "opt_state.leaves": "optim.state"}


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """A whole tensor of a checkpoint.

    Attributes:
        name: its name in the ranks' files.
        dtype: its dtype.
        shape: its shape.
        sources: the runs that it's stored in.
        packing: what its bytes mean, if it's packed.
        unpacked: its shape in the model then.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: list[Source]
    packing: Packing | None = None
    unpacked: tuple[int, ...] | None = None

    def header(self, name: str) -> Header:
        """Return what a file says about what ``read`` returns."""
        if self.packing is None:
            return Header(name, self.dtype, self.shape)
        return Header(name, dtype_of(self.packing.dtype), self.unpacked or ())

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, reader: RankReader) -> torch.Tensor:
        values = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        read_run(
            values.view(-1), whole_run(self.shape), self.sources, self.name, reader.read
        )
        if self.packing is not None:
            model_shape = self.unpacked or ()
            values = self.packing.unpack(values)[: math.prod(model_shape)].view(model_shape)
        return values


def stored_leaves(contents: Contents) -> dict[str, StoredLeaf]:
    """Return every whole tensor outside ``PerRank`` values, by name.

    Trees of the only ``TrainState`` are under ``model`` and ``optim.state``.
    """
    axes = any_plan(contents.plan).mesh_axes
    buffers = shard_buffers(contents.outline, contents.plan)
    title_of = _titles(contents)
    leaves: dict[str, StoredLeaf] = {}
    for name, stored_facts in contents.shared.items():
        dtype, title = dtype_of(stored_facts.dtype), title_of(stored_facts.label)
        whole_source = Source(0, 0, whole_run(stored_facts.shape))
        whole_tensor = StoredLeaf(name, dtype, stored_facts.shape, [whole_source])
        if name not in buffers:
            leaves[title] = whole_tensor
            continue
        buffer = buffers[name]
        turn_position = turn_of(stored_facts.turn, buffer, axes)
        for leaf in buffer.leaves:
            leaf_path = title.replace("*", leaf.path)
            if stored_facts.kind == "whole":  # such as a count of steps
                leaves[leaf_path] = whole_tensor
                continue
            whole_leaf = whole_run(leaf.whole_shape)
            own_sizes = {axis: axes[axis] for axis in buffer.own_axes(leaf)}
            # Note: a local leaf has no whole tensor, so each rank's values get a name of their own.
            for local_index in range(math.prod(own_sizes.values())):
                position = {**turn_position, **position_of(local_index, own_sizes)}
                sources = list(leaf_sources(buffer, leaf, axes, position, whole_leaf))
                leaf_name = f"{leaf_path}@{local_index}" if own_sizes else leaf_path
                packing = buffer.packing if dtype == torch.uint8 else None
                leaves[leaf_name] = StoredLeaf(
                    name, dtype, leaf.whole_shape, sources, packing, leaf.unpacked
                )
    return leaves


def _titles(contents: Contents) -> Callable[[str], str]:
    """Return a function from a label, such as ``train.shards.*``, to a name elsewhere."""
    trees = {facts.label.partition("*")[0].strip(".") for facts in contents.shared.values()}
    new_titles: dict[str, str] = {}
    for end, title in _TREES.items():
        matching_trees = [tree for tree in trees if f".{tree}".endswith(f".{end}")]
        # Note: of two TrainStates, such as a teacher and a student, none is the model.
        if len(matching_trees) == 1:
            new_titles[matching_trees[0]] = title
    # Note: then every label begins with the star.
    if trees == {""}:  # the state is a tree of shards
        new_titles[""] = "model"

    def title_of(label: str) -> str:
        tree_name, star, leaf_suffix = label.partition("*")
        tree_name = tree_name.strip(".")
        return f"{new_titles.get(tree_name, tree_name)}.{star}{leaf_suffix}".strip(".")

    return title_of


def export_dcp(path: StrPath, to: StrPath) -> Path:
    """Write a checkpoint of ``save`` as one of ``torch.distributed.checkpoint`` (DCP).

    You call it in one process, without a mesh, and load the result with FSDP2 or DDP on any number
    of ranks. The names are those of torch's ``get_state_dict`` for your only ``TrainState``; other
    trees keep theirs. Numbers, texts, ``PerRank`` values and an optimizer's options are left out,
    so pass ``DefaultLoadPlanner(allow_partial_load=True)`` to load an optimizer's state.

    Arguments:
        path: the checkpoint's folder.
        to: the folder to write, free or empty.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: there is no folder at ``path``.
        ValueError: the checkpoint is incomplete or damaged, or ``to`` holds something.

    Example:
        >>> import tempfile, warnings, torch, funcshard as fs
        >>> import torch.distributed.checkpoint as dcp
        >>> warnings.simplefilter("ignore")  # it warns of one process
        >>> params = {"w": torch.arange(4.0)}
        >>> plan, mesh = fs.make_plan(params, 1), fs.Mesh()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = fs.save(f"{folder}/a", {"shards": fs.shard(params, plan, mesh)}, plan, mesh)
        ...     state_dict = {"model": {"w": torch.zeros(4)}}
        ...     dcp.load(state_dict, checkpoint_id=fs.export_dcp(f"{folder}/a", f"{folder}/b"))
        >>> state_dict["model"]["w"]
        tensor([0., 1., 2., 3.])

    Source: ``torch.distributed.checkpoint.FileSystemWriter``.
    """
    return write_dcp(check_path("path", path), check_path("to", to))


def write_dcp(path: Path, folder: Path, watch: Watch = unwatched) -> Path:
    """Write a checkpoint as one of DCP; see ``export_dcp``.

    Arguments:
        path: the checkpoint's folder.
        folder: the folder to write.
        watch: ``watch(done, total)`` gets the number of bytes.
    """
    contents = read_contents(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"to must be a free path or an empty folder; found something at {folder}"
        )
    # Why here: importing it takes a second.
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint import metadata as md
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    leaves = stored_leaves(contents)
    packed_names = [name for name, leaf in leaves.items() if leaf.packing is not None]
    if packed_names:
        raise ValueError(
            f"{path} holds packed leaves, which other programs can't decode; found "
            f"{packed_names[0]!r}: restore it, and call export_safetensors"
        )
    # Why aliases: a state dict of torch has a tied parameter under each of its names.
    for planned_leaf in any_plan(contents.plan).leaves:
        names = [f"model.{name}" for name in planned_leaf.names]
        leaves |= {name: leaves[names[0]] for name in names if names[0] in leaves}
    dcp_entries: dict[str, Any] = {}
    items_of_ranks: dict[int, list[WriteItem]] = {}
    place_of_item: dict[Any, tuple[StoredLeaf, int, int]] = {}
    for name, leaf in leaves.items():
        properties, whole_size = md.TensorProperties(leaf.dtype), torch.Size(leaf.shape)
        dcp_entries[name] = md.TensorStorageMetadata(properties, whole_size, [])
        # Note: a run of a flat shard is up to 2n - 1 boxes, and DCP knows nothing but boxes.
        for source in leaf.sources:
            begin = source.start
            for box in source.run.boxes():
                offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
                chunk = md.ChunkStorageMetadata(offsets, sizes)
                dcp_entries[name].chunks.append(chunk)
                index = md.MetadataIndex(name, offsets)
                write_data = TensorWriteData(chunk, properties, whole_size)
                item = WriteItem(index, WriteItemType.SHARD, tensor_data=write_data)
                items_of_ranks.setdefault(source.rank, []).append(item)
                # Note: DCP's writer asks for the data of an item by this index.
                place_of_item[index] = leaf, source.rank, begin
                begin += box.numel
    folder.mkdir(parents=True, exist_ok=True)
    writer, results = FileSystemWriter(folder), []
    total_bytes, done_bytes = sum(leaf.nbytes for leaf in leaves.values()), 0
    with contents.reader() as reader:

        def resolve_data(item: Any) -> torch.Tensor:
            nonlocal done_bytes
            leaf, rank, begin = place_of_item[item.index]
            # Note: the elements of a box lie one after another in the shard.
            box_values = torch.empty(
                item.tensor_data.chunk.sizes, dtype=leaf.dtype, device="cpu"
            )
            reader.read(box_values.view(-1), rank, leaf.name, begin)
            done_bytes += box_values.nbytes
            watch(done_bytes, total_bytes)
            return box_values

        # Why rank by rank: a file for each, whose tensors are read one after another.
        for rank, items in items_of_ranks.items():
            # Note: of these two, torch's writer uses only prefix and resolve_data.
            save_plan = SavePlan(items, storage_data=SimpleNamespace(prefix=f"__{rank}_"))
            planner: Any = SimpleNamespace(resolve_data=resolve_data)
            results.append(writer.write_data(save_plan, planner).wait())
    writer.finish(md.Metadata(dcp_entries), results)
    return folder


def export_parameters(
    path: Path,
    to: Path,
    *,
    tree: str = "model",
    config: Path | None = None,
    watch: Watch = unwatched,
) -> list[Path]:
    """Write one tree of a checkpoint as safetensors files, and return their paths.

    Arguments:
        path: the checkpoint's folder.
        to: a file whose name ends in ``.safetensors``, or a folder.
        tree: the tree, as ``stored_leaves`` names it.
        config: a folder with the ``config.json`` of a model of Hugging Face, to write files for
            ``AutoModel.from_pretrained``; the whole model is then in memory.
        watch: ``watch(done, total)`` gets the number of bytes.
    """
    contents = read_contents(path)
    leaves = stored_leaves(contents)
    chosen_leaves = {
        name.removeprefix(f"{tree}."): leaf
        for name, leaf in leaves.items()
        if name.startswith(f"{tree}.")
    }
    # Note: such as model, or the name of an average of it.
    if not chosen_leaves:
        tree_names = sorted({name.rpartition(".")[0] for name in leaves})
        raise ValueError(
            f"{path} holds no tree {tree!r}; it holds tensors under {tree_names[:6]}: name a tree"
        )
    with contents.reader() as reader:

        def tensors() -> Iterator[torch.Tensor]:
            total_bytes, done_bytes = sum(leaf.nbytes for leaf in chosen_leaves.values()), 0
            for leaf in chosen_leaves.values():
                yield leaf.read(reader)
                done_bytes += leaf.nbytes
                watch(done_bytes, total_bytes)

        file_entries = [leaf.header(name) for name, leaf in chosen_leaves.items()]
        leaf_tensors = tensors()
        if config is not None:
            module = build_on_meta(config, None, None)
            # Note: conversions may join leaves of any units, so all leaves are here at once.
            by_name = stored(module, dict(zip(chosen_leaves, leaf_tensors, strict=True)))
            file_entries = headers_of(by_name)
            to.mkdir(parents=True, exist_ok=True)
            write_config(to, module, file_entries[0].dtype)
            leaf_tensors = iter(by_name.values())
        return write_tensors(to, file_entries, leaf_tensors, Mesh(), 5 * 10**9, None)
