"""The Muon assignment: which rank computes the update of which matrix, and the data sent for it.

Muon orthogonalises the update of each matrix as a whole, but every rank holds only a part of most
matrices. So the assignment gives each matrix an owner. All ranks send the owner their parts of the
update; the owner orthogonalises it, and sends each rank the part that the rank holds in its shard.
Each way is one all-to-all. If ranks along a model axis hold slices of a matrix, the owners of the
slices send them on to one of them, in an all-to-all along that axis. Everything here is pure data
that follows from the plan; ``muon_step`` executes it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from funcshard._utils import Shown, Table, table
from funcshard.plan import (
    Axes,
    BufferPlan,
    Event,
    LeafSpec,
    Plan,
    check_plan,
    dtype_of,
    position_of,
    rank_at,
    whole_shape_of,
)
from funcshard.train.param_groups import leaves_under, trainable_buffers

# Why bfloat16: torch.optim.Muon orthogonalises in bfloat16, so rounding the update before it is
# sent changes no bit of the result.
_SENT_DTYPE = "bfloat16"


def assign_owners(plan: Plan, matrices: Iterable[str] | None = None) -> Owners:
    """Assign each matrix of a plan to the rank that computes its update, with the work balanced.

    The work of a matrix is its number of elements times its smaller side, as in the products of the
    Newton–Schulz iteration. The heaviest matrix is assigned first, and each matrix goes to the rank
    that has the least work so far. The matrices are shared out among the ranks along the shard
    axis, and those that are cut along a model axis also among the ranks along that axis. Ranks
    along every other axis repeat the same work and send each other nothing.

    Arguments:
        plan: the plan.
        matrices: paths or globs of nodes; the trainable leaves of two dimensions under these nodes
            are assigned. By default every trainable leaf of two dimensions is.

    Returns:
        The owners.

    Raises:
        ValueError: a glob matches nothing, or the nodes that the globs match hold no matrix.

    Example:
        >>> import torch, funcshard as fs
        >>> blocks = [{"w": torch.zeros(4, 4)} for _ in range(4)]
        >>> plan = fs.make_plan({"emb": torch.zeros(9, 4), "blocks": blocks}, 2)
        >>> fs.assign_owners(plan, ["blocks.*"]).of
        {'blocks.0.w': 0, 'blocks.1.w': 1, 'blocks.2.w': 0, 'blocks.3.w': 1}
        >>> [(event.kind, event.bytes) for event in fs.assign_owners(plan, ["blocks.*"]).events]
        [('all_to_all', 36), ('all_to_all', 36)]
    """
    check_plan(plan)
    wanted_leaves = None if matrices is None else set(leaves_under(plan, matrices, "matrix path"))
    matrix_leaves = [
        (unit, buffer, leaf)
        for unit, buffer in trainable_buffers(plan)
        for leaf in buffer.leaves
        if len(leaf.shape) == 2
        and leaf.numel
        and (wanted_leaves is None or leaf.path in wanted_leaves)
    ]
    if wanted_leaves is not None and not matrix_leaves:
        raise ValueError(
            "matrices must name trainable leaves of two dimensions, or nodes that hold such "
            f"leaves; found none among {sorted(wanted_leaves)[:4]}: choose other paths, or leave matrices "
            "out to take every matrix"
        )
    ranks = plan.mesh_shape[1]
    cut = {each.axis for _, _, leaf in matrix_leaves for each in leaf.cuts if each.ranks > 1}
    axes = {axis: size for axis, size in plan.mesh_axes.items() if axis == "shard" or axis in cut}
    # The load of each rank along these axes; ranks along others repeat it.
    load = [0] * math.prod(axes.values())
    candidates: dict[tuple[str, ...], list[_Candidate]] = {}
    assigned = []
    for unit, buffer, leaf in sorted(
        matrix_leaves, key=lambda each: (-_work(each[2]), each[2].index)
    ):
        cuts = tuple(each for each in reversed(leaf.cuts) if each.ranks > 1)
        joined = {each.axis for each in cuts}
        chosen = tuple(
            axis
            for axis in axes
            if axis in joined or (axis == "shard" and "shard" not in buffer.local)
        )
        if chosen not in candidates:
            candidates[chosen] = [
                (0, *group) for group in enumerate(_ranks_by_index(chosen, axes).items())
            ]
        best, ranks_of_best = _least_loaded(candidates[chosen], load)
        for rank in ranks_of_best if chosen else ():
            load[rank] += _work(leaf)
        at = dict(zip(chosen, best, strict=True))
        owner = None if "shard" in buffer.local else at["shard"]
        assigned.append(
            Matrix(
                unit.name, buffer, leaf, owner, tuple((each.axis, at[each.axis]) for each in cuts)
            )
        )
    return Owners(
        ranks, tuple(sorted(assigned, key=lambda matrix: matrix.leaf.index)), tuple(axes.items())
    )


# Its load when seen last, its number, index and ranks.
_Candidate = tuple[int, int, tuple[tuple[int, ...], list[int]]]


def _least_loaded(
    candidates: list[_Candidate], load: Sequence[int]
) -> tuple[tuple[int, ...], list[int]]:
    """Return the first group of ranks with the least load, from a heap.

    Loads only grow, so the load that the heap has for a group is never too large. The first group
    for which it is right has the least load of all.
    """
    while True:
        seen, rank_order, (index, ranks) = candidates[0]
        least_load = max(load[rank] for rank in ranks)
        if least_load == seen:
            return index, ranks
        heapq.heapreplace(candidates, (least_load, rank_order, (index, ranks)))


def _positions(axes: Mapping[str, int]) -> list[dict[str, int]]:
    """Return the index along each axis of every rank of a grid, in the order of ranks."""
    return [position_of(rank, axes) for rank in range(math.prod(axes.values()))]


def _ranks_by_index(
    chosen: Iterable[str], axes: Mapping[str, int]
) -> dict[tuple[int, ...], list[int]]:
    """Return the ranks of a grid by their index along the chosen axes."""
    ranks_by_index: dict[tuple[int, ...], list[int]] = {}
    for rank, position in enumerate(_positions(axes)):
        ranks_by_index.setdefault(tuple(position[axis] for axis in chosen), []).append(rank)
    return ranks_by_index


def _work(leaf: LeafSpec) -> int:
    return math.prod(leaf.whole_shape) * min(leaf.whole_shape)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A leaf that Muon updates as a matrix.

    Attributes:
        unit: name of its unit.
        buffer: its flat buffer.
        leaf: the leaf.
        owner: position along the shard axis of the rank that computes its update; ``None`` if the
            leaf is local to a rank, so that every rank owns its own matrix.
        joiners: for each mesh axis along which ranks hold slices of the matrix, the innermost
            first, the position along it of the rank that joins them.
    """

    unit: str
    buffer: BufferPlan
    leaf: LeafSpec
    owner: int | None
    joiners: tuple[tuple[str, int], ...] = ()

    def joined_shape(self, axis: str | None) -> tuple[int, ...]:
        """Return the shape of the slices that are joined along ``axis``, or of the whole matrix."""
        done = [axis_name for axis_name, _ in self.joiners]
        inner = done if axis is None else done[: done.index(axis)]
        return whole_shape_of(self.leaf.shape, [cut for cut in self.leaf.cuts if cut.axis in inner])

    def owns(self, position: Mapping[str, int], axis: str | None) -> bool:
        """Return whether a rank has a slice to be joined along ``axis``, or the whole matrix.

        Arguments:
            position: index of the rank along each mesh axis.
            axis: an axis of ``joiners``, or ``None``.
        """
        return all(position[axis_name] == index for axis_name, index in self._fixed(axis).items())

    def owner_positions(self, axes: Mapping[str, int], axis: str | None) -> list[dict[str, int]]:
        """Return the positions on a grid of the ranks for which ``owns`` is true."""
        fixed = self._fixed(axis)
        free = {axis_name: 1 if axis_name in fixed else size for axis_name, size in axes.items()}
        return [position | fixed for position in _positions(free)]

    def _fixed(self, axis: str | None) -> dict[str, int]:
        """Return the index along some axes that all ranks have for which ``owns`` is true."""
        done = [axis_name for axis_name, _ in self.joiners]
        joiners_before = self.joiners if axis is None else self.joiners[: done.index(axis)]
        return ({} if self.owner is None else {"shard": self.owner}) | dict(joiners_before)

    def held(self, rank: int) -> range:
        """Return the elements of the raveled matrix that lie in the shard of ``rank``."""
        part = self.buffer.part(self.leaf, rank)
        return range(part.begin, part.end)

    def holders(self, ranks: int) -> range:
        """Return those of ``ranks`` ranks along the shard axis whose shards hold elements."""
        if self.buffer.shards == 1:
            return range(ranks)
        first, last = self.leaf.offset, self.leaf.offset + self.leaf.numel - 1
        return range(first // self.buffer.shard_numel, last // self.buffer.shard_numel + 1)

    def sent(self, rank: int, owner: int) -> range:
        """Return the elements of the update that ``rank`` sends to ``owner``, possibly itself."""
        # An owner that holds the whole matrix needs nothing from other ranks.
        sends = rank == owner or self.buffer.shards > 1
        return self.held(rank) if self.owner in (None, owner) and sends else range(0)

    def returned(self, owner: int, rank: int) -> range:
        """Return the elements of the update that ``owner`` returns to ``rank``, possibly itself."""
        is_owner = rank == owner if self.owner is None else owner == self.owner
        return self.held(rank) if is_owner else range(0)


class MatrixPart(NamedTuple):
    """Some elements of a raveled matrix."""

    matrix: Matrix
    elements: range


@dataclass(frozen=True, slots=True)
class AllToAll:
    """The part of one rank in one of the two all-to-alls of a Muon step.

    Attributes:
        sent: the parts of matrices that this rank sends, in the order of the ranks that receive
            them.
        send_sizes: number of elements that this rank sends to each rank, itself included.
        received: the parts that this rank receives, in the order of the ranks that send them.
        receive_sizes: number of elements that this rank receives from each rank, itself included.
        event: the collective as ``record_events`` records it; ``None`` if no rank has anything to
            send to another one, so that no collective runs.
    """

    sent: tuple[MatrixPart, ...]
    send_sizes: tuple[int, ...]
    received: tuple[MatrixPart, ...]
    receive_sizes: tuple[int, ...]
    event: Event | None


@dataclass(frozen=True, slots=True)
class Join:
    """The part of one rank in the all-to-all that joins slices of matrices along an axis.

    The all-to-all that returns the slices has ``sizes`` and ``joined_sizes`` swapped.

    Attributes:
        axis: the mesh axis.
        sent: the matrices of which this rank sends a slice, in the order of the receiving ranks.
        sizes: number of elements that this rank sends to each rank, itself included.
        joined: the matrices of which this rank receives a slice from every rank.
        joined_sizes: number of elements that it receives from each rank, itself included.
        event: the collective as ``record_events`` records it.
    """

    axis: str
    sent: tuple[Matrix, ...]
    sizes: tuple[int, ...]
    joined: tuple[Matrix, ...]
    joined_sizes: tuple[int, ...]
    event: Event | None


Elements = Callable[[Matrix, int, int], range]  # those that one rank sends to another; see Matrix


@dataclass(frozen=True, slots=True, repr=False)
class Owners(Shown):
    """Which rank computes the update of which matrix; made by ``assign_owners``.

    Attributes:
        ranks: number of ranks along the shard axis, which share the matrices out.
        matrices: the matrices, in tree order.
        axes: size of the shard axis, and of the axes along which ranks hold slices of matrices.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"a": torch.zeros(8, 8), "b": torch.zeros(4, 8), "c": torch.zeros(8)}
        >>> plan = fs.make_plan(params, 2)
        >>> fs.assign_owners(plan).of
        {'a': 0, 'b': 1}
    """

    ranks: int
    matrices: tuple[Matrix, ...]
    axes: Axes = ()

    @property
    def of(self) -> dict[str, int | None]:
        """The position of each matrix's owner along the shard axis, by path.

        ``None`` represents a matrix that is local to a rank: every rank owns its own.
        """
        return {matrix.leaf.path: matrix.owner for matrix in self.matrices}

    @property
    def events(self) -> tuple[Event, ...]:
        """The collectives of one step, as ``record_events`` records them.

        The first all-to-all brings the updates to the owners, the last one brings the
        orthogonalised updates back. Between them are two for each axis along which ranks hold
        slices of matrices: to join the slices, and to return them. An all-to-all in which no
        rank sends anything to another one does not run.
        """
        joins = [self._join_event(axis) for axis in self.join_axes]
        step_events = [
            self._event(Matrix.sent),
            *joins,
            *reversed(joins),
            self._event(Matrix.returned),
        ]
        return tuple(event for event in step_events if event is not None)

    @property
    def join_axes(self) -> tuple[str, ...]:
        """The axes along which slices are joined, in this order, and handed back in the reverse."""
        used = {axis for matrix in self.matrices for axis, _ in matrix.joiners}
        return tuple(axis for axis, _ in reversed(self.axes) if axis in used)

    def join(self, axis: str, position: Mapping[str, int]) -> Join:
        """Return the part of the rank at ``position`` in joining slices along ``axis``."""
        size = dict(self.axes)[axis]
        held = [
            matrix
            for matrix in self.matrices
            if axis in dict(matrix.joiners) and matrix.owns(position, axis)
        ]
        numel = {matrix.leaf.path: math.prod(matrix.joined_shape(axis)) for matrix in held}
        sent = [
            [matrix for matrix in held if dict(matrix.joiners)[axis] == other_rank]
            for other_rank in range(size)
        ]
        sizes = tuple(
            sum(numel[matrix.leaf.path] for matrix in rank_matrices) for rank_matrices in sent
        )
        mine = tuple(sent[position[axis]])
        joined = sum(numel[matrix.leaf.path] for matrix in mine)
        return Join(
            axis,
            tuple(matrix for rank_matrices in sent for matrix in rank_matrices),
            sizes,
            mine,
            (joined,) * size,
            self._join_event(axis),
        )

    def _join_event(self, axis: str) -> Event | None:
        """Return the all-to-all along an axis; it counts the busiest rank."""
        axes = dict(self.axes)
        size = axes[axis]
        sent = [0] * math.prod(axes.values())
        received = [0] * math.prod(axes.values())
        for matrix in self.matrices:
            joiners = dict(matrix.joiners)
            if axis not in joiners:
                continue
            numel = math.prod(matrix.joined_shape(axis))
            for position in matrix.owner_positions(axes, axis):
                rank = rank_at(position, axes)
                if joiners[axis] == position[axis]:
                    received[rank] += numel * (size - 1)
                else:
                    sent[rank] += numel
        most_numel = max(*sent, *received)
        itemsize = dtype_of(_SENT_DTYPE).itemsize
        return (
            Event("all_to_all", None, "", _SENT_DTYPE, most_numel * itemsize, axis, size)
            if most_numel
            else None
        )

    def to_owners(self, rank: int) -> AllToAll:
        """Return the part of ``rank`` in the all-to-all that brings the updates to the owners."""
        return self._all_to_all(Matrix.sent, rank)

    def from_owners(self, rank: int) -> AllToAll:
        """Return the part of ``rank`` in the all-to-all that brings the updates back."""
        return self._all_to_all(Matrix.returned, rank)

    def _all_to_all(self, elements: Elements, rank: int) -> AllToAll:
        sent: list[tuple[int, MatrixPart]] = []  # each part with the rank that receives it
        received: list[tuple[int, MatrixPart]] = []  # each part with the rank that sends it
        to_owners, of_owner = (sent, received) if elements is Matrix.sent else (received, sent)
        for matrix in self.matrices:
            owner = rank if matrix.owner is None else matrix.owner
            pairs = [(to_owners, owner)]
            if owner == rank:
                holders = (rank,) if matrix.owner is None else matrix.holders(self.ranks)
                pairs += [(of_owner, other_rank) for other_rank in holders]
            for parts, other_rank in pairs:
                between = (rank, other_rank) if parts is sent else (other_rank, rank)
                if sent_numel := elements(matrix, *between):
                    parts.append((other_rank, MatrixPart(matrix, sent_numel)))

        def ordered(
            parts: list[tuple[int, MatrixPart]],
        ) -> tuple[tuple[MatrixPart, ...], tuple[int, ...]]:
            sizes = [0] * self.ranks
            for other_rank, part in parts:
                sizes[other_rank] += len(part.elements)
            return tuple(part for _, part in sorted(parts, key=lambda pair: pair[0])), tuple(sizes)

        return AllToAll(*ordered(sent), *ordered(received), self._event(elements))

    def _event(self, elements: Elements) -> Event | None:
        size = self._busiest(elements) * dtype_of(_SENT_DTYPE).itemsize
        return (
            Event("all_to_all", None, "", _SENT_DTYPE, size, "shard", self.ranks) if size else None
        )

    def _busiest(self, elements: Elements) -> int:
        """Return the most elements that any one rank sends to, or receives from, other ranks."""
        # What crosses at a rank, as an owner and as a holder.
        owned, held = [0] * self.ranks, [0] * self.ranks
        steps = [0] * (self.ranks + 1)  # from the number of one rank to that of the next one
        for matrix in self.matrices:
            if matrix.owner is None or (elements is Matrix.sent and matrix.buffer.shards == 1):
                continue  # every rank sends to itself only
            holders, numel = matrix.holders(self.ranks), matrix.leaf.numel
            # Why no loop over ranks: all between the first and the last one hold the same number.
            if len(holders) > 2:
                inner = len(matrix.held(holders[1]))
                steps[holders[1]] += inner
                steps[holders[-1]] -= inner
            for rank in {holders[0], holders[-1]}:
                held[rank] += len(matrix.held(rank))
            at_owner = len(matrix.held(matrix.owner))
            held[matrix.owner] -= at_owner
            owned[matrix.owner] += (
                numel if matrix.buffer.shards > 1 else numel * self.ranks
            ) - at_owner
        return max(*owned, *map(operator.add, held, itertools.accumulate(steps)))

    def _parts(self) -> list[Table]:
        axes = dict(self.axes) or {"shard": self.ranks}
        header = ["rank" if len(axes) == 1 else " × ".join(axes), "matrices", "numel", "work"]
        rows = []
        for position in _positions(axes):
            owned = [matrix.leaf for matrix in self.matrices if matrix.owns(position, None)]
            numbers = [
                len(owned),
                sum(math.prod(leaf.whole_shape) for leaf in owned),
                sum(map(_work, owned)),
            ]
            rows.append([" × ".join(map(str, position.values())), *map(table.count, numbers)])
        traffic = table.size(sum(event.traffic for event in self.events))
        return [Table(f"Owners of {len(self.matrices)} matrices, {traffic} a step", header, rows)]
