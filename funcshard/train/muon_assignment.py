"""The Muon assignment: which rank computes the update of which matrix, and the data sent for it.

Muon orthogonalises the update of each matrix as a whole, but every rank holds only a part of most
matrices. So the assignment gives each matrix an owner. The parts meet there in stages: first, along
the shard axis, the elements of flat shards; then, along each model axis that cuts the matrix, its
slices. The owner orthogonalises the update, and the stages run back in reverse. Each is one
all-to-all each way. Everything here is pure data that follows from the plan; ``muon_step`` executes
it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
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
    dtype_of,
    position_of,
    whole_shape_of,
)
from funcshard.train.param_groups import leaves_under, trainable_buffers

# Why bfloat16: torch.optim.Muon orthogonalises in bfloat16, so rounding the update before it is
# sent changes no bit of the result.
_SENT_DTYPE = "bfloat16"

Stage = str | None
"""The mesh axis along which slices of matrices meet; ``None`` for elements of flat shards, which
meet along the shard axis."""


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
    matrix_leaves = [
        (unit, buffer, leaf)
        for unit, buffer in trainable_buffers(plan)
        for leaf in buffer.leaves
        if len(leaf.shape) == 2 and leaf.numel
    ]
    if matrices is not None:
        chosen_paths = set(leaves_under(plan, matrices, "matrix path"))
        matrix_leaves = [entry for entry in matrix_leaves if entry[2].path in chosen_paths]
        if not matrix_leaves:
            raise ValueError(
                "matrices must name trainable leaves of two dimensions, or nodes that hold such "
                f"leaves; found none among {sorted(chosen_paths)[:4]}: choose other paths, or "
                "leave matrices out to take every matrix"
            )
    cut_axes = {cut.axis for _, _, leaf in matrix_leaves for cut in leaf.cuts if cut.ranks > 1}
    axes = {
        axis: size for axis, size in plan.mesh_axes.items() if axis == "shard" or axis in cut_axes
    }
    # The work of each rank so far, on a grid of these axes; ranks along other axes repeat it.
    load_grid = torch.zeros(*axes.values(), dtype=torch.int64, device="cpu")
    assigned_matrices = []
    # Heaviest first: the light ones then fill what the heavy ones left uneven.
    matrix_leaves.sort(key=lambda entry: (-_work(entry[2]), entry[2].index))
    for unit, buffer, leaf in matrix_leaves:
        stages: list[Stage] = [] if "shard" in buffer.local else [None]
        stages += [cut.axis for cut in reversed(leaf.cuts) if cut.ranks > 1]
        stage_axes = {stage or "shard" for stage in stages}
        owner_axes = {axis: size for axis, size in axes.items() if axis in stage_axes}
        # Note: an owner works once for each rank along the axes that its matrix is not cut along,
        # so what counts is the busiest of these.
        repeated_dims = [dim for dim, axis in enumerate(axes) if axis not in stage_axes]
        busiest_load = load_grid.amax(repeated_dims) if repeated_dims else load_grid
        owner_place = position_of(int(busiest_load.argmin()), owner_axes)
        load_grid[tuple(owner_place.get(axis, slice(None)) for axis in axes)] += _work(leaf)
        owners = tuple((stage, owner_place[stage or "shard"]) for stage in stages)
        assigned_matrices.append(Matrix(unit.name, buffer, leaf, owners))
    return Owners(tuple(sorted(assigned_matrices, key=lambda m: m.leaf.index)), tuple(axes.items()))


def _work(leaf: LeafSpec) -> int:
    return math.prod(leaf.whole_shape) * min(leaf.whole_shape)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A leaf that Muon updates as a matrix.

    Attributes:
        unit: name of its unit.
        buffer: its flat buffer.
        leaf: the leaf.
        owners: the stages in which its parts meet, in order, each with the position along the
            stage's axis of the rank at which they meet. A leaf that is local to a rank has none, so
            that every rank owns its own matrix.
    """

    unit: str
    buffer: BufferPlan
    leaf: LeafSpec
    owners: tuple[tuple[Stage, int], ...]

    def place(self, stage: Stage = "") -> dict[str, int]:
        """Return the position, along some axes, of the ranks that hold a part in ``stage``.

        Without a stage, it is that of the ranks that own the whole matrix.
        """
        earlier_owners = itertools.takewhile(lambda owner: owner[0] != stage, self.owners)
        return {axis or "shard": index for axis, index in earlier_owners}

    def shape(self, stage: Stage = "") -> tuple[int, ...]:
        """Return the shape of the slices that meet in ``stage``, or of the whole matrix."""
        place = self.place(stage)
        return whole_shape_of(self.leaf.shape, [c for c in self.leaf.cuts if c.axis in place])

    def part(self, stage: Stage, index: int, peer: int) -> Part:
        """Return the part of the rank at ``index`` along the axis, to swap with ``peer``."""
        if stage is None:
            in_leaf = self.buffer.part(self.leaf, index)
            return Part(self.leaf.path, peer, 0, in_leaf.begin, (in_leaf.numel,))
        # A slice: it lies at its rank's place along the dim that the axis cuts.
        shape = self.shape(stage)
        dim = next(cut.dim for cut in self.leaf.cuts if cut.axis == stage)
        return Part(self.leaf.path, peer, dim, index * shape[dim], shape)

    def sent(self, stage: Stage, ranks: int, back: bool) -> torch.Tensor:
        """Return the number of elements that each rank along the stage's axis sends its owner.

        Arguments:
            stage: the stage.
            ranks: number of ranks along its axis.
            back: whether the owner sends them back.
        """
        if stage is not None:
            return torch.full((ranks,), math.prod(self.shape(stage)), device="cpu")
        if self.buffer.shards == 1:
            # Every rank holds the whole matrix: the owner needs nothing, and all need its update.
            _, owner = self.owners[0]
            sent_numels = torch.zeros(ranks, dtype=torch.int64, device="cpu")
            sent_numels[slice(None) if back else owner] = self.leaf.numel
            return sent_numels
        begin = self.leaf.offset
        shard_edges = torch.arange(ranks + 1, device="cpu") * self.buffer.shard_numel
        return shard_edges.clamp(begin, begin + self.leaf.numel).diff()


class Part(NamedTuple):
    """A part of a matrix that a rank sends or receives in a stage.

    Attributes:
        path: path of the matrix.
        peer: the rank along the stage's axis that it goes to, or comes from.
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
        sent: the parts that it sends, in the order of the ranks that receive them.
        send_sizes: number of elements that it sends to each rank, itself included.
        received: the parts that it receives, in the order of the ranks that send them.
        receive_sizes: number of elements that it receives from each rank, itself included.
        event: the collective as ``record_events`` records it; ``None`` if no rank has anything to
            send to another one, so that no collective runs.
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

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"a": torch.zeros(8, 8), "b": torch.zeros(4, 8), "c": torch.zeros(8)}
        >>> plan = fs.make_plan(params, 2)
        >>> fs.assign_owners(plan).of
        {'a': 0, 'b': 1}
    """

    matrices: tuple[Matrix, ...]
    axes: Axes

    @property
    def of(self) -> dict[str, int | None]:
        """The position of each matrix's owner along the shard axis, by path.

        ``None`` represents a matrix that is local to a rank: every rank owns its own.
        """
        return {matrix.leaf.path: dict(matrix.owners).get(None) for matrix in self.matrices}

    @property
    def events(self) -> tuple[Event, ...]:
        """The collectives of one step, as ``record_events`` records them.

        The first all-to-all brings the updates to the owners, the last one brings the
        orthogonalised updates back. Between them are two for each axis along which ranks hold
        slices of matrices: to join the slices, and to return them. An all-to-all in which no
        rank sends anything to another one does not run.
        """
        step_events = [self._event(stage, back=False) for stage in self.stages]
        step_events += [self._event(stage, back=True) for stage in reversed(self.stages)]
        return tuple(event for event in step_events if event is not None)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in which parts meet, in order."""
        used_stages = {stage for matrix in self.matrices for stage, _ in matrix.owners}
        # The shard axis first, then the model axes from the innermost, as cuts are undone.
        return tuple(stage for stage in (None, *reversed(dict(self.axes))) if stage in used_stages)

    def all_to_all(self, stage: Stage, position: Mapping[str, int], back: bool) -> AllToAll:
        """Return the part of the rank at ``position`` in a stage, on the way there or back."""
        axis, ranks = stage or "shard", dict(self.axes)[stage or "shard"]
        own_index = position[axis]
        held: list[Part] = []
        owned: list[Part] = []
        for matrix in self.matrices:
            owner = dict(matrix.owners).get(stage)
            # Ranks off the place of the earlier stages hold nothing of the matrix any more.
            if owner is None or not matrix.place(stage).items() <= position.items():
                continue
            holders = matrix.sent(stage, ranks, back).nonzero().flatten().tolist()
            if own_index in holders:
                held.append(matrix.part(stage, own_index, owner))
            if own_index == owner:
                owned += [matrix.part(stage, rank, rank) for rank in holders]
        sent, received = (owned, held) if back else (held, owned)
        return AllToAll(
            axis, *_in_order(sent, ranks), *_in_order(received, ranks), self._event(stage, back)
        )

    def _event(self, stage: Stage, back: bool) -> Event | None:
        """Return the all-to-all of a stage; it counts the busiest rank."""
        axis, other_axes = stage or "shard", dict(self.axes)
        ranks = other_axes.pop(axis)
        # The elements that cross at each rank: as an owner of matrices, and as a holder of parts.
        # Why tensors: Python would take minutes for the pairs of a thousand ranks.
        owned, held = torch.zeros(2, *other_axes.values(), ranks, dtype=torch.int64, device="cpu")
        for matrix in self.matrices:
            owner, place = dict(matrix.owners).get(stage), matrix.place(stage)
            if owner is None:
                continue
            crossing = matrix.sent(stage, ranks, back)
            crossing[owner] = 0  # its own part does not cross
            member_ranks = tuple(place.get(other_axis, slice(None)) for other_axis in other_axes)
            held[member_ranks] += crossing
            owned[*member_ranks, owner] += crossing.sum()
        crossing_bytes = int(torch.maximum(owned, held).max()) * dtype_of(_SENT_DTYPE).itemsize
        if not crossing_bytes:
            return None
        return Event("all_to_all", None, "", _SENT_DTYPE, crossing_bytes, axis, ranks)

    def _parts(self) -> list[Table]:
        axes = dict(self.axes)
        rows = []
        for rank in range(math.prod(axes.values())):
            position = position_of(rank, axes)
            owned_leaves = [m.leaf for m in self.matrices if m.place().items() <= position.items()]
            numel = sum(math.prod(leaf.whole_shape) for leaf in owned_leaves)
            row_counts = map(table.count, [len(owned_leaves), numel, sum(map(_work, owned_leaves))])
            rows.append([" × ".join(map(str, position.values())), *row_counts])
        traffic = table.size(sum(event.traffic for event in self.events))
        header = ["rank" if len(axes) == 1 else " × ".join(axes), "matrices", "numel", "work"]
        return [Table(f"Owners of {len(self.matrices)} matrices, {traffic} a step", header, rows)]


def _in_order(parts: list[Part], ranks: int) -> tuple[tuple[Part, ...], tuple[int, ...]]:
    """Return parts in the order of their peers, and the number of elements of each peer."""
    sizes = [0] * ranks
    for part in parts:
        sizes[part.peer] += part.numel
    return tuple(sorted(parts, key=lambda part: part.peer)), tuple(sizes)
