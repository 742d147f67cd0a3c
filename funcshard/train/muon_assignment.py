"""The Muon assignment: which rank computes the update of which matrix, and the data sent for it.

Muon orthogonalises the update of each matrix as a whole, but every rank holds only a part of most
matrices. So the assignment gives each matrix an owner. All ranks send the owner their parts of the
update; the owner orthogonalises it, and sends each rank the part that the rank holds in its shard.
Each way is one all-to-all. Everything here is pure data that follows from the plan; ``muon_step``
executes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from funcshard._utils import table
from funcshard.plan import BufferPlan, Event, LeafSpec, Plan, check_plan, dtype_of
from funcshard.train.param_groups import leaves_under, trainable_buffers

__all__ = ["AllToAll", "Matrix", "MatrixPart", "Owners", "assign_owners"]

# Why bfloat16: torch.optim.Muon orthogonalises in bfloat16, so rounding the update before it is
# sent changes no bit of the result.
_SENT_DTYPE = "bfloat16"


def assign_owners(plan: Plan, matrices: Iterable[str] | None = None) -> Owners:
    """Assign each matrix of a plan to the rank that computes its update, with the work balanced.

    The work of a matrix is its number of elements times its smaller side, as in the products of the
    Newton–Schulz iteration. The heaviest matrix is assigned first, and each matrix goes to the rank
    that has the least work so far. The matrices are shared out among the ranks along the shard
    axis. Ranks along the replicate axis repeat the same work and send each other nothing.

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
    wanted = None if matrices is None else set(leaves_under(plan, matrices, "matrix path"))
    found = [
        (unit, buffer, leaf)
        for unit, buffer in trainable_buffers(plan)
        for leaf in buffer.leaves
        if len(leaf.shape) == 2 and leaf.numel and (wanted is None or leaf.path in wanted)
    ]
    if wanted is not None and not found:
        raise ValueError(
            f"matrices must name trainable leaves of two dimensions, or nodes that hold such leaves; found none among "
            f"{sorted(wanted)[:4]}: choose other paths, or leave matrices out to take every matrix"
        )
    ranks = plan.mesh_shape[1]
    load = [0] * ranks
    owner: dict[str, int] = {}
    for _, buffer, leaf in sorted(found, key=lambda each: (-_work(each[2]), each[2].index)):
        if "shard" not in buffer.local:
            rank = load.index(min(load))
            load[rank] += _work(leaf)
            owner[leaf.path] = rank
    assigned = [Matrix(unit.name, buffer, leaf, owner.get(leaf.path)) for unit, buffer, leaf in found]
    return Owners(ranks, tuple(sorted(assigned, key=lambda matrix: matrix.leaf.index)))


def _work(leaf: LeafSpec) -> int:
    return leaf.numel * min(leaf.shape)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A leaf that Muon updates as a matrix.

    Attributes:
        unit: name of its unit.
        buffer: its flat buffer.
        leaf: the leaf.
        owner: position along the shard axis of the rank that computes its update; ``None`` if the
            leaf is local to a rank, so that every rank owns a matrix of its own.
    """

    unit: str
    buffer: BufferPlan
    leaf: LeafSpec
    owner: int | None

    def held(self, rank: int) -> range:
        """Return the elements of the raveled matrix that lie in the shard of ``rank``."""
        part = self.buffer.part(self.leaf, rank)
        return range(part.begin, part.end)

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


Elements = Callable[[Matrix, int, int], range]  # those that one rank sends to another; see Matrix


@dataclass(frozen=True, slots=True, repr=False)
class Owners:
    """Which rank computes the update of which matrix; made by ``assign_owners``.

    Attributes:
        ranks: number of ranks along the shard axis, which share the matrices out.
        matrices: the matrices, in tree order.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"a": torch.zeros(8, 8), "b": torch.zeros(4, 8), "c": torch.zeros(8)}
        >>> plan = fs.make_plan(params, 2)
        >>> fs.assign_owners(plan).of
        {'a': 0, 'b': 1}
    """

    ranks: int
    matrices: tuple[Matrix, ...]

    @property
    def of(self) -> dict[str, int | None]:
        """The position of each matrix's owner along the shard axis, by path.

        ``None`` stands for a matrix that is local to a rank: every rank owns its own.
        """
        return {matrix.leaf.path: matrix.owner for matrix in self.matrices}

    @property
    def events(self) -> tuple[Event, ...]:
        """The collectives of one step, as ``record_events`` records them.

        The first all-to-all brings the updates to the owners, the second brings the orthogonalised
        updates back. An all-to-all in which no rank sends anything to another one does not run.
        """
        return tuple(event for event in (self._event(Matrix.sent), self._event(Matrix.returned)) if event is not None)

    def to_owners(self, rank: int) -> AllToAll:
        """Return the part of ``rank`` in the all-to-all that brings the updates to the owners."""
        return self._all_to_all(Matrix.sent, rank)

    def from_owners(self, rank: int) -> AllToAll:
        """Return the part of ``rank`` in the all-to-all that brings the updates back."""
        return self._all_to_all(Matrix.returned, rank)

    def _all_to_all(self, elements: Elements, rank: int) -> AllToAll:
        def parts(sender: int, receiver: int) -> list[MatrixPart]:
            found = (MatrixPart(matrix, elements(matrix, sender, receiver)) for matrix in self.matrices)
            return [part for part in found if part.elements]

        def flat(of_ranks: list[list[MatrixPart]]) -> tuple[MatrixPart, ...]:
            return tuple(part for parts in of_ranks for part in parts)

        def sizes(of_ranks: list[list[MatrixPart]]) -> tuple[int, ...]:
            return tuple(sum(len(part.elements) for part in parts) for parts in of_ranks)

        sent = [parts(rank, other) for other in range(self.ranks)]
        received = [parts(other, rank) for other in range(self.ranks)]
        return AllToAll(flat(sent), sizes(sent), flat(received), sizes(received), self._event(elements))

    def _event(self, elements: Elements) -> Event | None:
        size = self._busiest(elements) * dtype_of(_SENT_DTYPE).itemsize
        return Event("all_to_all", None, "", _SENT_DTYPE, size, "shard", self.ranks) if size else None

    def _busiest(self, elements: Elements) -> int:
        """Return the most elements that any one rank sends to, or receives from, other ranks."""
        sent, received = [0] * self.ranks, [0] * self.ranks
        for matrix in self.matrices:
            for sender in range(self.ranks):
                for receiver in range(self.ranks):
                    numel = len(elements(matrix, sender, receiver)) if sender != receiver else 0
                    sent[sender] += numel
                    received[receiver] += numel
        return max(*sent, *received)

    def __str__(self) -> str:
        header = ["rank", "matrices", "numel", "work"]
        rows = []
        for rank in range(self.ranks):
            owned = [matrix.leaf for matrix in self.matrices if matrix.owner in (rank, None)]
            numbers = [len(owned), sum(leaf.numel for leaf in owned), sum(map(_work, owned))]
            rows.append([str(rank), *map(table.count, numbers)])
        traffic = table.size(sum(event.traffic for event in self.events))
        return table.as_text(f"Owners of {len(self.matrices)} matrices, {traffic} a step", header, rows)

    __repr__ = __str__
