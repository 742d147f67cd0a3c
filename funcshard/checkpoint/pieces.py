"""Pieces: the part of each leaf that one rank holds."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from funcshard.checkpoint.resharding import Run, copy_axes, copy_run, run_in_shard
from funcshard.comm import Mesh
from funcshard.core import can_cast
from funcshard.plan import (
    Box,
    BufferPlan,
    LeafSpec,
    dtype_name,
    dtype_of,
    own_axes,
    rank_at,
    slice_offsets,
)


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
    planned_dtype = dtype_of(buffer.dtype)
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
        is_inside = len(ends) == len(piece.shape) and all(map(operator.le, ends, piece.shape))
        if not is_inside or not 0 <= piece.offset <= piece.box.numel - piece.tensor.numel():
            raise ValueError(
                f"a piece of leaf {leaf.path!r} of {where} must lie inside its slice, and the slice "
                f"inside the whole leaf of shape {leaf.whole_shape}; found {piece.tensor.numel()} "
                f"elements at offset {piece.offset} within {piece.within or 'the whole leaf'}: "
                "pass the first index and the length of each dimension, and count offset in the "
                "raveled slice"
            )
    # Why one: pieces of a local leaf on several ranks have the same offsets, and other values.
    if "shard" in own_axes(buffer.local, leaf.cuts) and len(pieces) != 1:
        raise ValueError(
            f"leaf {leaf.path!r} is local to each rank, so {where} must hold this rank's own piece "
            f"of it; found {len(pieces)} pieces"
        )
    part = buffer.part(leaf, mesh.shard.rank)
    # Note: pieces may overlap, come in any order, or count in other slices. So they are copied
    # like values, and what is marked at the end is covered.
    covered_marks = torch.zeros(part.end - part.begin, dtype=torch.bool, device="cpu")
    marked_pieces = [
        piece._replace(tensor=torch.ones(piece.tensor.shape, dtype=torch.bool, device="cpu"))
        for piece in pieces
    ]
    copy_pieces(covered_marks, marked_pieces, leaf, buffer, mesh)
    if not covered_marks.all():
        slice_origin = slice_offsets(leaf.shape, leaf.cuts, mesh.position)
        slice_text = f" of its slice at {slice_origin}" if leaf.whole_shape != leaf.shape else ""
        first_missing = part.begin + int(covered_marks.logical_not().nonzero()[0])
        raise ValueError(
            f"pieces of leaf {leaf.path!r} of {where} must cover elements {part.begin} to "
            f"{part.end}{slice_text}, this rank's part under the plan; no piece holds element "
            f"{first_missing}: pass the pieces of all ranks, as in {{name: [pieces of each rank]}}"
        )


def copy_pieces(
    out: torch.Tensor, pieces: Sequence[Piece], leaf: LeafSpec, buffer: BufferPlan, mesh: Mesh
) -> None:
    """Copy this rank's elements of a leaf, 1-D, from pieces of it."""
    _, target = run_in_shard(buffer, leaf, mesh.position)
    for piece in pieces:
        copy_run(out, target, piece.tensor, Run(piece.offset, piece.tensor.numel(), piece.box))
