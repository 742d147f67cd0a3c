"""Owners of matrices: which rank computes the update of which matrix, and what travels for that, as pure data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from funcshard import table
from funcshard.events import Event
from funcshard.groups import leaves_under, trainable
from funcshard.plan import BufferPlan, LeafSpec, Plan, dtype_of

__all__ = ["Matrix", "Owners", "assign_owners"]

_SENT = "bfloat16"  # in which updates are computed, so rounding before they travel changes no bit


@dataclass(frozen=True, slots=True)
class Matrix:
    """A leaf that is updated as a matrix.

    Attributes:
        unit: its unit.
        buffer: its flat buffer.
        leaf: the leaf.
        owner: position on the shard axis of the rank that computes its update; ``None``: each rank has a leaf of its own.
    """

    unit: str
    buffer: BufferPlan
    leaf: LeafSpec
    owner: int | None

    def held(self, rank: int) -> tuple[int, int]:
        """The first element that a rank holds, and one past the last."""
        if self.buffer.shards == 1:
            return 0, self.leaf.numel
        begin = rank * self.buffer.shard_numel - self.leaf.offset
        return max(0, begin), max(0, begin, min(begin + self.buffer.shard_numel, self.leaf.numel))

    def sent(self, rank: int, owner: int) -> tuple[int, int]:
        """What a rank sends to an owner: the elements that this owner does not have itself, or its own."""
        if self.owner is None or self.buffer.shards == 1:
            mine = rank == owner and self.owner in (None, owner)
        else:
            mine = owner == self.owner
        low, high = self.held(rank)
        return (low, high) if mine and low < high else (0, 0)

    def returned(self, owner: int, rank: int) -> tuple[int, int]:
        """What an owner sends back to a rank: the update of what that rank holds."""
        mine = rank == owner if self.owner is None else owner == self.owner
        low, high = self.held(rank)
        return (low, high) if mine and low < high else (0, 0)


@dataclass(frozen=True, slots=True, repr=False)
class Owners:
    """Which rank computes the update of which matrix; made by ``assign_owners``.

    Attributes:
        ranks: number of ranks on the shard axis, among which the matrices are shared out.
        matrices: the matrices, in the order of the tree.

    Example:
        >>> import torch, funcshard as fs
        >>> plan = fs.make_plan({"a": torch.zeros(8, 8), "b": torch.zeros(4, 8), "c": torch.zeros(8)}, 2)
        >>> fs.assign_owners(plan).of
        {'a': 0, 'b': 1}
    """

    ranks: int
    matrices: tuple[Matrix, ...]

    @property
    def of(self) -> dict[str, int | None]:
        """Path of each matrix -> its owner's position on the shard axis; ``None``: each rank's own."""
        return {matrix.leaf.path: matrix.owner for matrix in self.matrices}

    @property
    def events(self) -> tuple[Event, ...]:
        """The collectives of one step, as ``record_events`` records them: pieces to the owners, updates back."""
        return tuple(event for event in self.ways() if event is not None)

    def ways(self) -> tuple[Event | None, Event | None]:
        """The collective to the owners, and the one back; ``None`` where nothing travels."""

        def event(part: Callable[[Matrix, int, int], tuple[int, int]]) -> Event | None:
            size = self._busiest(part) * dtype_of(_SENT).itemsize
            return Event("all_to_all", None, "", _SENT, size, "shard", self.ranks) if size else None

        return event(Matrix.sent), event(Matrix.returned)

    def _busiest(self, part: Callable[[Matrix, int, int], tuple[int, int]]) -> int:
        """The most elements that one rank sends to others, or receives."""
        sent, received = [0] * self.ranks, [0] * self.ranks
        for matrix in self.matrices:
            for a in range(self.ranks):
                for b in range(self.ranks):
                    low, high = part(matrix, a, b) if a != b else (0, 0)
                    sent[a] += high - low
                    received[b] += high - low
        return max(*sent, *received)

    def __str__(self) -> str:
        header = ["rank", "matrices", "numel", "work"]
        rows = []
        for rank in range(self.ranks):
            mine = [matrix.leaf for matrix in self.matrices if matrix.owner in (rank, None)]
            numbers = [len(mine), sum(leaf.numel for leaf in mine), sum(map(_work, mine))]
            rows.append([str(rank), *map(table.count, numbers)])
        traffic = table.size(sum(event.traffic for event in self.events))
        return table.as_text(f"Owners of {len(self.matrices)} matrices, {traffic} a step", header, rows)

    __repr__ = __str__


def assign_owners(plan: Plan, matrices: Iterable[str] | None = None) -> Owners:
    """Give each matrix of a plan to the rank that computes its update, so that every rank has about the same work.

    The work of a matrix is its elements times its smaller side, as for the products of Newton–Schulz. The heaviest comes
    first, each to the rank that has the least. Ranks along the replicate axis share out nothing: each row of the mesh
    does the same, so nothing travels between rows.

    Arguments:
        plan: the plan.
        matrices: paths or globs of nodes; the trainable leaves of two dimensions that lie under them are taken. By
            default all of them.

    Returns:
        The owners.

    Raises:
        ValueError: a glob matches nothing, or what they match holds no matrix.

    Example:
        >>> import torch, funcshard as fs
        >>> plan = fs.make_plan({"emb": torch.zeros(9, 4), "blocks": [{"w": torch.zeros(4, 4)} for _ in range(4)]}, 2)
        >>> fs.assign_owners(plan, ["blocks.*"]).of
        {'blocks.0.w': 0, 'blocks.1.w': 1, 'blocks.2.w': 0, 'blocks.3.w': 1}
        >>> [(event.kind, event.bytes) for event in fs.assign_owners(plan, ["blocks.*"]).events]
        [('all_to_all', 36), ('all_to_all', 36)]
    """
    wanted = None if matrices is None else set(leaves_under(plan, matrices, "matrix"))
    found = [
        Matrix(unit.name, buffer, leaf, None)
        for unit, buffer in trainable(plan)
        for leaf in buffer.leaves
        if len(leaf.shape) == 2 and leaf.numel and (wanted is None or leaf.path in wanted)
    ]
    if wanted is not None and not found:
        raise ValueError(
            f"matrices must name trainable leaves of two dimensions, or nodes that hold some; found none among "
            f"{sorted(wanted)[:4]}: choose others, or leave matrices out"
        )
    ranks = plan.mesh_shape[1]
    load = [0] * ranks
    owner: dict[str, int] = {}
    for matrix in sorted(found, key=lambda matrix: (-_work(matrix.leaf), matrix.leaf.index)):
        if "shard" not in matrix.buffer.local:
            rank = load.index(min(load))
            load[rank] += _work(matrix.leaf)
            owner[matrix.leaf.path] = rank
    in_order = sorted(found, key=lambda matrix: matrix.leaf.index)
    return Owners(ranks, tuple(Matrix(m.unit, m.buffer, m.leaf, owner.get(m.leaf.path)) for m in in_order))


def _work(leaf: LeafSpec) -> int:
    return leaf.numel * min(leaf.shape)
