"""Which rank computes the update of which matrix, and the data sent for it.

Optimizers such as Muon need whole matrices, so each one has an owner. Its parts meet there in
stages: first, along the shard axis, the elements of flat shards; then, along each model axis that
cuts the matrix, its slices. Afterwards the stages run back in reverse. Each is one all-to-all each
way. All of this is data that follows from the plan; ``matrix_transport`` executes it.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from funcshard._utils import table
from funcshard._utils.table import Shown, Table
from funcshard.plan import (
    Axes,
    BufferPlan,
    Event,
    LeafSpec,
    Plan,
    check_plan,
    dtype_name,
    dtype_of,
    position_of,
    trainable_buffers,
    whole_shape_of,
)
from funcshard.train.param_groups import leaves_under

Stage = str | None
"""The mesh axis along which slices of matrices meet; ``None`` for elements of flat shards, which
meet along the shard axis."""


def assign_owners(plan: Plan, matrices: Iterable[str] | None = None) -> Owners:
    """Assign each matrix of a plan to the rank that computes its update, with the work balanced.

    The work of a matrix is its number of elements times its smaller side. Matrices are assigned
    heaviest first, each to the rank that has the least work so far: among the ranks along the shard
    axis, and along each model axis that cuts the matrix. Ranks along other axes repeat the same
    work.

    Arguments:
        plan: the plan.
        matrices: paths or globs of nodes, whose trainable leaves of two dimensions are assigned; by
            default all such leaves.

    Returns:
        The owners.

    Raises:
        ValueError: a glob matches nothing, or the nodes hold no matrix.

    Example:
        >>> import torch, funcshard as fs
        >>> blocks = [{"w": torch.zeros(4, 4)} for _ in range(4)]
        >>> plan = fs.make_plan({"emb": torch.zeros(9, 4), "blocks": blocks}, 2)
        >>> fs.assign_owners(plan, ["blocks.*"]).of
        {'blocks.0.w': 0, 'blocks.1.w': 1, 'blocks.2.w': 0, 'blocks.3.w': 1}
        >>> [(event.kind, event.bytes) for event in fs.assign_owners(plan, ["blocks.*"]).events]
        [('all_to_all', 36), ('all_to_all', 36)]
    """
    # Why bfloat16: torch.optim.Muon orthogonalises in bfloat16, so rounding the update before it is
    # sent changes no bit of the result.
    return assigned(plan, matrices, stacks=False, dtype="bfloat16")


def assigned(
    plan: Plan,
    matrices: Iterable[str] | None,
    *,
    stacks: bool,
    gathered: int = 1,
    dtype: str | None = None,
) -> Owners:
    """Assign matrices as ``assign_owners`` does.

    Arguments:
        plan: the plan.
        matrices: as in ``assign_owners``.
        stacks: whether leaves of three dimensions are stacks of matrices.
        gathered: number of tensors that an owner gets of each matrix.
        dtype: dtype in which they are sent; by default one that holds all matrices exactly.
    """
    check_plan(plan)
    chosen_paths = (
        None if matrices is None else set(leaves_under(plan, matrices, "matrix path"))
    )
    matrix_leaves = [
        (unit, buffer, holder, item, leaf)
        for unit, buffer in trainable_buffers(plan)
        for holder in buffer.leaves
        if holder.numel and (chosen_paths is None or holder.path in chosen_paths)
        for item, leaf in _items(holder, stacks)
    ]
    if chosen_paths is not None and not matrix_leaves:
        raise ValueError(
            f"matrices must name trainable leaves of two {'or three ' * stacks}dimensions, or nodes "
            f"that hold such leaves; found none among {sorted(chosen_paths)[:4]}: choose other "
            "paths, or leave matrices out to take every matrix"
        )
    cut_axes = {
        cut.axis for *_, leaf in matrix_leaves for cut in leaf.cuts if cut.ranks > 1
    }
    axes = {
        axis: size
        for axis, size in plan.mesh_axes.items()
        if axis == "shard" or axis in cut_axes
    }
    positions = _positions(axes)
    load = [0] * len(
        positions
    )  # of the ranks along these axes; ranks along others repeat it
    heaps: dict[tuple[str, ...], list[_Candidate]] = {}
    owned = []
    for unit, buffer, holder, item, leaf in sorted(
        matrix_leaves, key=lambda entry: (-_work(entry[-1]), entry[-1].index)
    ):
        stages: list[Stage] = [] if "shard" in buffer.local else [None]
        stages += [cut.axis for cut in reversed(leaf.cuts) if cut.ranks > 1]
        along = tuple(
            axis for axis in axes if axis in [stage or "shard" for stage in stages]
        )
        if along not in heaps:
            ranks_by_index: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for rank, position in enumerate(positions):
                ranks_by_index[tuple(position[axis] for axis in along)].append(rank)
            heaps[along] = [(0, *entry) for entry in enumerate(ranks_by_index.items())]
        best, ranks = _least_loaded(heaps[along], load)
        for rank in ranks if along else ():
            load[rank] += _work(leaf)
        index_along = dict(zip(along, best, strict=True))
        owners = tuple((stage, index_along[stage or "shard"]) for stage in stages)
        owned.append(Matrix(unit.name, buffer, leaf, owners, holder, item))
    # Note: both sorts keep the order of matrices of one stack.
    owned.sort(key=lambda matrix: matrix.leaf.index)
    if dtype is None:
        dtypes = {matrix.buffer.shard_dtype for matrix in owned} or {torch.float32}
        dtype = dtype_name(functools.reduce(torch.promote_types, dtypes))
    return Owners(tuple(owned), tuple(axes.items()), dtype, gathered)


def _items(holder: LeafSpec, stacks: bool) -> list[tuple[int | None, LeafSpec]]:
    """Return the matrices of a leaf: itself, or those of a stack, each with its number."""
    if len(holder.shape) == 2:
        return [(None, holder)]
    if len(holder.shape) != 3 or not stacks:
        return []
    # Why without cuts of the stack: ranks along such an axis hold other matrices, which are whole.
    cuts = tuple(cut._replace(dim=cut.dim - 1) for cut in holder.cuts if cut.dim)
    count, *shape = holder.shape
    return [
        (
            item,
            LeafSpec(
                path=f"{holder.path}[{item}]",
                shape=tuple(shape),
                offset=holder.offset + item * math.prod(shape),
                index=holder.index,
                cuts=cuts,
            ),
        )
        for item in range(count)
    ]


# Its load when seen last, its number, index and ranks.
_Candidate = tuple[int, int, tuple[tuple[int, ...], list[int]]]


def _least_loaded(
    candidates: list[_Candidate], load: Sequence[int]
) -> tuple[tuple[int, ...], list[int]]:
    """Return the first group of ranks with the least load, from a heap."""
    while True:
        seen_load, order, (index, ranks) = candidates[0]
        # Note: loads only grow, so the heap's load is never too large, and the first group for
        # which it is right has the least of all.
        current_load = max(load[rank] for rank in ranks)
        if current_load == seen_load:
            return index, ranks
        heapq.heapreplace(candidates, (current_load, order, (index, ranks)))


def _positions(axes: Mapping[str, int]) -> list[dict[str, int]]:
    return [position_of(rank, axes) for rank in range(math.prod(axes.values()))]


def _work(leaf: LeafSpec) -> int:
    return math.prod(leaf.whole_shape) * min(leaf.whole_shape)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix that has an owner.

    Attributes:
        unit: name of its unit.
        buffer: its flat buffer.
        leaf: the leaf, or a part of a stack as if it were one.
        owners: the stages in which its parts meet, in order, each with the index along the stage's
            axis at which they meet; none for a leaf that is local to a rank.
        holder: the leaf of the plan.
        item: its number in the stack that ranks hold; ``None`` if the leaf isn't a stack.
    """

    unit: str
    buffer: BufferPlan
    leaf: LeafSpec
    owners: tuple[tuple[Stage, int], ...]
    holder: LeafSpec
    item: int | None

    def place(self, stage: Stage = "") -> dict[str, int]:
        """Return the position, along some axes, of the ranks that hold a part in ``stage``.

        Without a stage, it is that of the owners of the whole matrix.
        """
        before = itertools.takewhile(lambda owner: owner[0] != stage, self.owners)
        return {axis or "shard": index for axis, index in before}

    def shape(self, stage: Stage = "") -> tuple[int, ...]:
        """Return the shape of the slices that meet in ``stage``, or of the whole matrix."""
        place = self.place(stage)
        return whole_shape_of(
            self.leaf.shape, [c for c in self.leaf.cuts if c.axis in place]
        )

    def part(self, stage: Stage, index: int, peer: int) -> Part:
        """Return the part of the rank at ``index`` along the axis, to swap with ``peer``."""
        if stage is None:
            begin, end, _ = self.buffer.part(self.leaf, index)
            return Part(self.leaf.path, peer, 0, begin, (end - begin,))
        shape = self.shape(stage)
        dim = next(cut.dim for cut in self.leaf.cuts if cut.axis == stage)
        return Part(self.leaf.path, peer, dim, index * shape[dim], shape)

    def runs(self, stage: Stage, ranks: int, back: bool) -> list[tuple[range, int]]:
        """Return the ranks whose parts are sent, in runs of equal parts, with a part's elements.

        Arguments:
            stage: the stage.
            ranks: number of ranks along its axis.
            back: whether the owner sends the parts back.
        """
        if stage is not None:
            return [(range(ranks), math.prod(self.shape(stage)))]
        size, begin = self.buffer.shard_numel, self.leaf.offset
        end = begin + self.leaf.numel
        if self.buffer.shards == 1:  # an owner that holds the whole matrix needs nothing
            _, owner = self.owners[0]
            return [(range(ranks) if back else range(owner, owner + 1), self.leaf.numel)]
        first, last = begin // size, (end - 1) // size
        if first == last:
            return [(range(first, last + 1), self.leaf.numel)]
        return [
            (range(first, first + 1), (first + 1) * size - begin),
            (range(first + 1, last), size),
            (range(last, last + 1), end - last * size),
        ]


class Part(NamedTuple):
    """A part of a matrix that a rank sends or receives in a stage.

    Attributes:
        path: path of the matrix.
        peer: the index along the stage's axis that it goes to, or comes from.
        dim: the dimension along which the parts follow one another.
        begin: where it begins along this dimension.
        shape: its shape; that of elements of a flat shard has one dimension.
    """

    path: str
    peer: int
    dim: int
    begin: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class AllToAll:
    """What one rank sends and receives in a stage, one way.

    Attributes:
        axis: the mesh axis.
        sent: the parts that it sends, in the order of their receivers.
        send_sizes: number of elements that it sends to each rank, itself included.
        received: the parts that it receives, in the order of their senders.
        receive_sizes: number of elements that it receives from each rank, itself included.
        event: the collective for one tensor of each matrix, as ``record_events`` records it;
            ``None`` if no rank sends anything to another one, and none runs.
    """

    axis: str
    sent: tuple[Part, ...]
    send_sizes: tuple[int, ...]
    received: tuple[Part, ...]
    receive_sizes: tuple[int, ...]
    event: Event | None


@dataclass(frozen=True, slots=True, repr=False)
class Owners(Shown):
    """Which rank computes the update of which matrix; made by ``assign_owners``.

    Attributes:
        matrices: the matrices, in tree order.
        axes: size of the shard axis, and of the axes along which ranks hold slices of matrices.
        dtype: the dtype in which parts are sent.
        gathered: number of tensors that an owner gets of each matrix.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"a": torch.zeros(8, 8), "b": torch.zeros(4, 8), "c": torch.zeros(8)}
        >>> plan = fs.make_plan(params, 2)
        >>> fs.assign_owners(plan).of
        {'a': 0, 'b': 1}
    """

    matrices: tuple[Matrix, ...]
    axes: Axes
    dtype: str
    gathered: int = 1

    @property
    def of(self) -> dict[str, int | None]:
        """Index of each matrix's owner along the shard axis; ``None`` if every rank owns one."""
        return {matrix.leaf.path: dict(matrix.owners).get(None) for matrix in self.matrices}

    @property
    def events(self) -> tuple[Event, ...]:
        """The collectives of one step, as ``record_events`` records them."""
        stages = self.stages
        there = [self._event(stage, back=False) for stage in stages]
        back = [self._event(stage, back=True) for stage in reversed(stages)]
        return (
            *(times(event, self.gathered) for event in there if event is not None),
            *(event for event in back if event is not None),
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in which parts meet, in order."""
        used = {stage for matrix in self.matrices for stage, _ in matrix.owners}
        return tuple(stage for stage in (None, *reversed(dict(self.axes))) if stage in used)

    def all_to_all(self, stage: Stage, position: Mapping[str, int], back: bool) -> AllToAll:
        """Return the part of the rank at ``position`` in a stage, there or back."""
        axis = stage or "shard"
        mine, ranks = position[axis], dict(self.axes)[axis]
        held: list[Part] = []
        owned: list[Part] = []
        for matrix in self.matrices:
            owner = dict(matrix.owners).get(stage)
            if owner is None or not matrix.place(stage).items() <= position.items():
                continue
            runs = [run for run, _ in matrix.runs(stage, ranks, back)]
            if any(mine in run for run in runs):
                held.append(matrix.part(stage, mine, owner))
            if mine == owner:
                owned += [matrix.part(stage, rank, rank) for run in runs for rank in run]
        sent, received = (owned, held) if back else (held, owned)
        return AllToAll(
            axis,
            *_in_order(sent, ranks),
            *_in_order(received, ranks),
            self._event(stage, back),
        )

    def _event(self, stage: Stage, back: bool) -> Event | None:
        axis = stage or "shard"
        ranks = dict(self.axes)[axis]
        members = [matrix for matrix in self.matrices if stage in dict(matrix.owners)]
        other_axes = {axis for matrix in members for axis in matrix.place(stage)}
        # What crosses at a rank, by its place along the other axes: as an owner, and as a holder.
        owned: Counter[tuple[tuple[int, ...], int]] = Counter()
        # Why steps from one rank to the next: many ranks in a row hold parts of one size.
        steps: dict[tuple[int, ...], list[int]] = defaultdict(lambda: [0] * (ranks + 1))
        for matrix in members:
            owner, place = dict(matrix.owners)[stage], matrix.place(stage)
            runs = matrix.runs(stage, ranks, back)
            kept = sum(numel for run, numel in runs if owner in run)
            crossing = sum(len(run) * numel for run, numel in runs) - kept
            own_run = (range(owner, owner + 1), -kept)
            for key in itertools.product(
                *(
                    [place[a]] if a in place else range(n)
                    for a, n in self.axes
                    if a in other_axes
                )
            ):
                owned[key, owner] += crossing
                for run, numel in (*runs, own_run):
                    steps[key][run.start] += numel
                    steps[key][run.stop] -= numel
        held = (max(itertools.accumulate(changes)) for changes in steps.values())
        # Note: an event of an exchange counts the busiest rank; see ``Event.bytes``.
        size = max(*owned.values(), *held, 0, 0) * dtype_of(self.dtype).itemsize
        return (
            Event("all_to_all", None, "", self.dtype, size, axis, ranks) if size else None
        )

    def _parts(self) -> list[Table]:
        axes = dict(self.axes)
        rows = []
        for position in _positions(axes):
            owned = [m.leaf for m in self.matrices if m.place().items() <= position.items()]
            numel = sum(math.prod(leaf.whole_shape) for leaf in owned)
            counts = map(table.count, [len(owned), numel, sum(map(_work, owned))])
            rows.append([" × ".join(map(str, position.values())), *counts])
        traffic = table.size(sum(event.traffic for event in self.events))
        header = [
            "rank" if len(axes) == 1 else " × ".join(axes),
            "matrices",
            "numel",
            "work",
        ]
        return [
            Table(
                f"Owners of {len(self.matrices)} matrices, {traffic} a step", header, rows
            )
        ]


def times(event: Event, tensors: int) -> Event:
    """Return the event of several tensors that are sent together, given that of one."""
    return dataclasses.replace(event, bytes=event.bytes * tensors)


def _in_order(parts: list[Part], ranks: int) -> tuple[tuple[Part, ...], tuple[int, ...]]:
    """Return parts in the order of their peers, and each peer's number of elements."""
    sizes = [0] * ranks
    for part in parts:
        sizes[part.peer] += part.numel
    return tuple(sorted(parts, key=lambda part: part.peer)), tuple(sizes)
