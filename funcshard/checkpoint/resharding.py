"""Which elements of a leaf lie in which rank's shard, and copies between such runs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from funcshard.comm import Mesh
from funcshard.core import can_cast
from funcshard.plan import (
    Box,
    BufferPlan,
    LeafSpec,
    boxes,
    dtype_name,
    position_of,
    rank_at,
    slice_offsets,
)

ByAxis = Mapping[str, int]
"""A number for each mesh axis: its size, or the index of a rank along it."""

Read = Callable[[torch.Tensor, int, str, int], Any]
"""A function that fills a 1-D tensor from a rank's stored tensor: ``(out, rank, name, begin)``."""


class Run(NamedTuple):
    """Consecutive elements of a slice of a leaf.

    Attributes:
        begin: index of the first element in the raveled slice.
        within: the slice, as a box of the whole leaf.
    """

    begin: int
    numel: int
    within: Box

    def boxes(self) -> list[Box]:
        """Return the boxes of the whole leaf that the run consists of."""
        run_boxes = boxes(self.within.sizes, self.begin, self.begin + self.numel)
        return [run_box.moved(self.within.offsets) for run_box in run_boxes]


class Source(NamedTuple):
    """A run of a leaf in one rank's shard.

    Attributes:
        start: index of its first element in the shard.
    """

    rank: int
    start: int
    run: Run


def whole_run(shape: Sequence[int]) -> Run:
    """Return all elements of a whole leaf."""
    return Run(0, math.prod(shape), Box(tuple(0 for _ in shape), tuple(shape)))


def run_in_shard(buffer: BufferPlan, leaf: LeafSpec, position: ByAxis) -> tuple[slice, Run]:
    """Return the run of a leaf at a rank's ``position``, and its place in the shard."""
    # Note: a buffer that isn't sharded has all of the leaf, whatever the index.
    begin, end, in_shard = buffer.part(leaf, position.get("shard", 0))
    within = Box(slice_offsets(leaf.shape, leaf.cuts, position), leaf.shape)
    return in_shard, Run(begin, end - begin, within)


def as_leaf(buffer: BufferPlan) -> LeafSpec:
    """Return a flat buffer, without its padding, as a leaf of itself."""
    return LeafSpec(buffer.leaves[0].path, (buffer.numel,), offset=0, index=0)


def copy_axes(buffer: BufferPlan, axes: ByAxis) -> dict[str, int]:
    """Return the mesh axes along which every rank holds the same shard, with their sizes."""
    return {
        axis: size
        for axis, size in axes.items()
        if axis not in buffer.local and not (axis == "shard" and buffer.shards > 1)
    }


def turn_of(turn: int, buffer: BufferPlan, axes: ByAxis) -> dict[str, int]:
    """Return the position, along ``copy_axes``, of the rank that stores a shard for all copies."""
    # Why turns: ranks with copies share the writing, tensor after tensor.
    return position_of(turn, copy_axes(buffer, axes))


def leaf_sources(
    buffer: BufferPlan,
    leaf: LeafSpec,
    axes: ByAxis,
    position: ByAxis,
    target: Run,
) -> Iterator[Source]:
    """Yield the runs of a leaf under a plan that have elements of ``target``.

    Arguments:
        axes: size of each mesh axis of that plan.
        position: the position along axes that don't cut the leaf or its buffer, 0 by default.
    """
    target_boxes = target.boxes()
    # Note: one turn of the loop for each slice that the old model axes cut the leaf into.
    slice_counts = {cut.axis: cut.ranks for cut in leaf.cuts}
    for slice_index in range(math.prod(slice_counts.values())):
        slice_position = {**position, **position_of(slice_index, slice_counts)}
        within = Box(slice_offsets(leaf.shape, leaf.cuts, slice_position), leaf.shape)
        slice_overlaps = filter(None, (box.overlap(within) for box in target_boxes))
        slice_spans = [_span(overlap, within) for overlap in slice_overlaps]
        if not slice_spans:
            continue
        # Note: the run may hold elements between the spans that no one asked for. One longer read
        # is cheaper than many short ones, and copy_run leaves these elements out.
        run_begin = min(part_begin for part_begin, _ in slice_spans)
        run_end = max(part_end for _, part_end in slice_spans)
        shard_numel = buffer.shard_numel
        first_shard = (leaf.offset + run_begin) // shard_numel
        last_shard = (leaf.offset + run_end - 1) // shard_numel
        for shard_index in range(first_shard, last_shard + 1):
            # Note: shards count in the flat buffer, and runs in the leaf.
            shard_begin = shard_index * shard_numel - leaf.offset  # counts in the leaf
            part_begin = max(run_begin, shard_begin)
            part_end = min(run_end, shard_begin + shard_numel)
            part_run = Run(part_begin, part_end - part_begin, within)
            # Note: a buffer that isn't sharded lies whole on every rank.
            own_index = {"shard": shard_index} if buffer.shards > 1 else {}
            rank = rank_at({**slice_position, **own_index}, axes)
            yield Source(rank, part_begin - shard_begin, part_run)


def read_run(
    out: torch.Tensor,
    target: Run,
    sources: Iterable[Source],
    name: str,
    read: Read,
    ranks_on: int = 0,
) -> None:
    """Fill a run from stored shards, whose runs have all of its elements.

    Arguments:
        out: the elements of ``target``, 1-D.
        read: fills a tensor with stored elements.
        ranks_on: how many ranks behind those of the sources the copies are to read.
    """
    for source_rank, start, run in sources:
        rank = source_rank + ranks_on
        if run.within == target.within:
            begin = run.begin - target.begin
            read(out[begin : begin + run.numel], rank, name, start)
        else:
            values = torch.empty(run.numel, dtype=out.dtype, device="cpu")
            read(values, rank, name, start)
            copy_run(out, target, values, run)


@torch.no_grad()
def copy_run(out: torch.Tensor, target: Run, values: torch.Tensor, source: Run) -> int:
    """Copy the elements that two runs share, and return their number.

    ``out`` and ``values`` are the elements of ``target`` and of ``source``, 1-D.
    """
    # Note: the runs count in the same slice, so the overlap is one copy, without boxes.
    if target.within == source.within:
        begin = max(target.begin, source.begin)
        end = min(target.begin + target.numel, source.begin + source.numel)
        if begin < end:
            out[begin - target.begin : end - target.begin].copy_(
                values[begin - source.begin : end - source.begin]
            )
        return max(end - begin, 0)
    copied_numel = 0
    # Note: a run of another slice overlaps in boxes of the whole leaf, and each is one strided
    # copy.
    source_views = _views(values, source)
    for target_box, target_view in _views(out, target):
        for source_box, source_view in source_views:
            if shared_box := target_box.overlap(source_box):
                source_part = source_view[
                    shared_box.moved([-n for n in source_box.offsets]).slices
                ]
                target_view[
                    shared_box.moved([-n for n in target_box.offsets]).slices
                ].copy_(source_part)
                copied_numel += shared_box.numel
    return copied_numel


def _views(flat: torch.Tensor, run: Run) -> list[tuple[Box, torch.Tensor]]:
    """Return the boxes of a run with their elements, as views."""
    box_views, done_numel = [], 0
    for box in run.boxes():
        box_views.append((box, flat[done_numel : done_numel + box.numel].view(box.sizes)))
        done_numel += box.numel
    return box_views


def _span(box: Box, within: Box) -> tuple[int, int]:
    """Return the range of a box in the raveled slice."""
    # Note: a box that isn't contiguous in the slice spans more than its own elements.
    first = last = 0
    for begin, size, low, side in zip(*box, *within, strict=True):
        first = first * side + begin - low
        last = last * side + begin - low + size - 1
    return first, last + 1


# --- pieces -------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """The consecutive elements of a leaf that one rank holds, for ``sharded=True``.

    ``whole[piece.slices].ravel()[piece.offset:]`` begins with the elements. If a rank holds none,
    the piece is empty.

    Attributes:
        tensor: the elements, 1-D.
        offset: index of the first element in the raveled leaf, or slice of it.
        shape: shape of the whole leaf.
        copy: number of this copy; write the pieces with ``copy == 0`` to write every element once.
        within: first index and length of the slice in each dimension of the leaf; ``()`` if it
            isn't cut into slices.

    Example:
        >>> import torch, funcshard as fs
        >>> piece = fs.Piece(torch.zeros(5), offset=3, shape=(3, 4), copy=0)
        >>> range(piece.offset, piece.offset + len(piece.tensor))
        range(3, 8)
        >>> piece = fs.Piece(torch.zeros(6), 0, (3, 4), within=((0, 3), (2, 2)))
        >>> torch.arange(12).view(3, 4)[piece.slices].tolist()
        [[2, 3], [6, 7], [10, 11]]
    """

    tensor: torch.Tensor
    offset: int
    shape: tuple[int, ...]
    copy: int = 0
    within: tuple[tuple[int, int], ...] = ()

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the slice in the whole leaf."""
        return self.box.slices

    @property
    def box(self) -> Box:
        """The slice as a box of the whole leaf."""
        sides = self.within or [(0, size) for size in self.shape]
        return Box(tuple(begin for begin, _ in sides), tuple(size for _, size in sides))


def own_pieces(
    flat: torch.Tensor, buffer: BufferPlan, mesh: Mesh
) -> Iterator[tuple[LeafSpec, Piece]]:
    """Yield this rank's piece of each leaf, as a view of ``flat``."""
    # Note: ranks along copy_axes hold the same elements; their number among these is the copy.
    copy = rank_at(mesh.position, copy_axes(buffer, mesh.shape))
    for leaf in buffer.leaves:
        in_shard, run = run_in_shard(buffer, leaf, mesh.position)
        # Why empty pieces too: every rank then has all names, and the dtypes of optimizer state.
        yield leaf, piece_of(flat.detach()[in_shard], run, leaf, copy)


def piece_of(elements: torch.Tensor, run: Run, leaf: LeafSpec, copy: int = 0) -> Piece:
    """Return a run of a leaf as a piece."""
    # Note: () means the whole leaf, as for every leaf that no model axis cuts.
    within: Any = ()
    if run.within.sizes != leaf.whole_shape:
        within = tuple(zip(*run.within, strict=True))
    return Piece(elements, run.begin, leaf.whole_shape, copy, within)


def as_pieces(value: Any) -> list[Piece] | None:
    """Return an entry of a state dict as a list of pieces, or ``None``."""
    if isinstance(value, Piece):
        return [value]
    if isinstance(value, Sequence) and all(isinstance(piece, Piece) for piece in value):
        return list(value)
    return None


def check_pieces(
    pieces: Sequence[Piece],
    leaf: LeafSpec,
    buffer: BufferPlan,
    mesh: Mesh,
    where: str,
    *,
    cast: bool | None = None,
) -> None:
    """Raise ``ValueError`` unless pieces hold a leaf's elements that this rank needs.

    ``where`` names their source; ``cast`` is as in ``check_leaf``.
    """
    planned_dtype = buffer.shard_dtype
    for piece in pieces:
        dtype, shape = piece.tensor.dtype, piece.shape
        is_castable = dtype != planned_dtype and can_cast(dtype, planned_dtype)
        has_dtype = dtype == planned_dtype or (cast and is_castable)
        # Note: a piece has the shape of the whole leaf, and elements of its slice.
        if piece.tensor.ndim != 1 or shape != leaf.whole_shape or not has_dtype:
            form = f" in {piece.tensor.ndim} dimensions" * (piece.tensor.ndim != 1)
            remedy = ": pass cast=True to convert them" * (cast is False and is_castable)
            raise ValueError(
                f"pieces of leaf {leaf.path!r} of {where} must be 1-D, of shape {leaf.whole_shape} "
                f"and dtype {buffer.dtype}, as planned; found {shape} and "
                f"{dtype_name(dtype)}{form}{remedy}"
            )
        ends = [begin + size for begin, size in piece.within] or piece.shape
        is_inside = len(ends) == len(piece.shape) and all(
            map(operator.le, ends, piece.shape)
        )
        if not is_inside or not 0 <= piece.offset <= piece.box.numel - piece.tensor.numel():
            raise ValueError(
                f"a piece of leaf {leaf.path!r} of {where} must lie inside its slice of shape "
                f"{leaf.whole_shape}; found {piece.tensor.numel()} elements at offset "
                f"{piece.offset} within {piece.within or 'the whole leaf'}: pass index and length "
                "of each dimension, and count offset in the raveled slice"
            )
    # Why one: pieces of a local leaf on several ranks have the same offsets, and other values.
    if "shard" in buffer.own_axes(leaf) and len(pieces) != 1:
        raise ValueError(
            f"leaf {leaf.path!r} is local to each rank, so {where} must hold this rank's own piece "
            f"of it; found {len(pieces)} pieces"
        )
    part = buffer.part(leaf, mesh.shard.rank)
    # Note: pieces may overlap, come in any order, or count in other slices. So they are copied
    # like values, and what is marked at the end is covered.
    covered_marks = torch.zeros(part.end - part.begin, dtype=torch.bool, device="cpu")
    marked_pieces = [
        piece._replace(
            tensor=torch.ones(piece.tensor.shape, dtype=torch.bool, device="cpu")
        )
        for piece in pieces
    ]
    copy_pieces(covered_marks, marked_pieces, leaf, buffer, mesh)
    if not covered_marks.all():
        slice_origin = slice_offsets(leaf.shape, leaf.cuts, mesh.position)
        slice_text = (
            f" of its slice at {slice_origin}" if leaf.whole_shape != leaf.shape else ""
        )
        first_missing = part.begin + int(covered_marks.logical_not().nonzero()[0])
        raise ValueError(
            f"pieces of leaf {leaf.path!r} of {where} must cover elements {part.begin} to "
            f"{part.end}{slice_text}, this rank's part under the plan; no piece holds element "
            f"{first_missing}: pass the pieces of all ranks, as in {{name: [pieces of each rank]}}"
        )


def copy_pieces(
    out: torch.Tensor,
    pieces: Sequence[Piece],
    leaf: LeafSpec,
    buffer: BufferPlan,
    mesh: Mesh,
) -> None:
    """Copy this rank's elements of a leaf, 1-D, from pieces of it."""
    _, target = run_in_shard(buffer, leaf, mesh.position)
    for piece in pieces:
        copy_run(
            out, target, piece.tensor, Run(piece.offset, piece.tensor.numel(), piece.box)
        )
