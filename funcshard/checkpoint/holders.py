"""Which ranks of a saved job hold the elements that a rank reads: computed from the stored plan.

``flatten_state`` decides by the plan alone which rank stores which part of a leaf. So the ranks
that hold a run of elements can be computed, and no list of them is stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from funcshard.checkpoint.metadata import (
    Plans,
    TensorMetadata,
    TreeSpec,
    any_plan,
    by_entry,
    copy_axes,
    local_axes,
    metadata_of,
)
from funcshard.checkpoint.read_items import ReadBox, ReadItem
from funcshard.plan import BufferPlan, LeafSpec, position_of, rank_at


def holders(
    reads: Sequence[ReadItem | ReadBox],
    outline: TreeSpec,
    items: Mapping[str, TensorMetadata],
    plans: Plans,
) -> dict[int, list[ReadItem | ReadBox]]:
    """Return the ranks that hold elements of ``reads``, each with the reads that it holds some of.

    Arguments:
        reads: the elements to read.
        outline: the tree of the stored state.
        items: metadata of the stored tensors by name.
        plans: the plans that the stored state was cut by.
    """
    mesh_axes = any_plan(plans).mesh_axes
    of_tensor: dict[str, tuple[BufferPlan, LeafSpec]] = {}
    for _, node, plan in by_entry(outline, plans):
        leaves = {
            leaf.path: (buffer, leaf)
            for unit in plan.unit_list
            for buffer in unit.buffers
            for leaf in buffer.leaves
        }
        of_tensor |= {name: leaves[path] for path, name in _leaf_tensors(node)}
    items_by_rank: dict[int, list[ReadItem | ReadBox]] = {}
    for item in reads:
        stored_kind = metadata_of(item.name, items).kind
        if stored_kind == "rank":
            ranks = [int(item.name.rpartition("@")[2])]
        elif stored_kind == "whole":
            ranks = [0]
        else:
            name = item.name if item.name in of_tensor else item.name.rpartition("@")[0]
            index = 0 if name == item.name else int(item.name.rpartition("@")[2])
            axes = {axis: mesh_axes[axis] for axis in local_axes(stored_kind)}
            ranks = _holders_of_run(
                *of_tensor[name], position_of(index, axes), *_run(item), mesh_axes
            )
        for rank in ranks:
            items_by_rank.setdefault(rank, []).append(item)
    return items_by_rank


def _holders_of_run(
    buffer: BufferPlan,
    leaf: LeafSpec,
    local: Mapping[str, int],
    begin: int,
    end: int,
    mesh_axes: Mapping[str, int],
) -> list[int]:
    """Return the ranks that store elements ``begin : end``, as ``flatten_state`` chose them."""
    axes = copy_axes(buffer, mesh_axes)
    position = {
        **dict.fromkeys(mesh_axes, 0),
        **local,
        **position_of(leaf.index % math.prod(axes.values()), axes),
    }
    if buffer.shards == 1 or begin == end:
        return [rank_at(position, mesh_axes)] if begin < end else []
    first, last = ((leaf.offset + index) // buffer.shard_numel for index in (begin, end - 1))
    return [rank_at({**position, "shard": shard}, mesh_axes) for shard in range(first, last + 1)]


def _run(item: ReadItem | ReadBox) -> tuple[int, int]:
    """Return the shortest run of elements of the stored tensor that has all that an item reads."""
    if isinstance(item, ReadItem):
        return item.begin, item.begin + item.out.numel()
    strides = [math.prod(item.shape[dim + 1 :]) for dim in range(len(item.shape))]
    begin = sum(offset * stride for offset, stride in zip(item.box.offsets, strides, strict=True))
    span = sum((size - 1) * stride for size, stride in zip(item.box.sizes, strides, strict=True))
    return begin, begin + span + 1


def _leaf_tensors(spec: TreeSpec) -> Iterator[tuple[str, str]]:
    """Yield the leaf's path and the name of each tensor in the trees of shards of a state."""
    if spec is None or spec[0] in ("value", "tensor", "rank"):
        return
    if spec[0] == "shards":
        for path, node in spec[2]:
            for name in _tensors(node):
                yield path, name
        return
    for child in spec[3]:
        yield from _leaf_tensors(child)


def _tensors(spec: TreeSpec) -> Iterator[str]:
    if spec is None or spec[0] in ("value", "rank"):
        return
    if spec[0] == "tensor":
        yield spec[1]
        return
    for child in spec[3]:
        yield from _tensors(child)
