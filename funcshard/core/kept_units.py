"""The units that stay gathered within one call of ``value_and_grad``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from funcshard._utils import version
from funcshard.core.buffer_comm import AnyGatherHandle, BufferComm, SharedGatherHandle
from funcshard.plan import UnitPlan


class KeptUnit(NamedTuple):
    """The gathered buffers of one unit.

    Attributes:
        unit: the unit.
        numbers: the numbers of its shards.
        comms: the communication of its buffers.
        versions: how often each shard had been written to when it was gathered.
        handles: the handles of its all-gathers; ``None`` for a buffer that needs none.
    """

    unit: UnitPlan
    numbers: Sequence[int]
    comms: Sequence[BufferComm]
    versions: list[int]
    handles: list[SharedGatherHandle | None]


class KeptUnits:
    """The units that one call keeps gathered, by the numbers of their shards among its leaves.

    A second forward finds the gathered buffers here, and so does the recomputation of a checkpoint.
    A unit is dropped when the gradients of all of its uses have come. At the end of a backward all
    units are dropped, except, before the last micro-batch, those with
    ``reshard_after_backward=False``. So the collectives of a rank depend on the order of its
    program, as on all other ranks, and never on memory that happens to be alive.

    Attributes:
        by_leaf: the units, by the numbers of their shards.
    """

    __slots__ = ("by_leaf",)

    def __init__(self) -> None:
        self.by_leaf: dict[int, KeptUnit] = {}

    def find(
        self, numbers: Sequence[int], comms: Sequence[BufferComm], shards: Sequence[torch.Tensor]
    ) -> list[SharedGatherHandle | None] | None:
        """Return handles of the gathered buffers of ``shards``; ``None`` if these are not kept.

        Arguments:
            numbers: the numbers of the shards.
            comms: the communication of each buffer, which must be that of the first gather.
            shards: the shards, which must be unchanged since the first gather.
        """
        found = self.by_leaf.get(numbers[0])
        if found is None or found.numbers != numbers or not (found.comms is comms or found.comms == comms):
            return None
        unchanged = [version(shard) for shard in shards] == found.versions
        return found.handles if unchanged and all(h is None or h.unwritten for h in found.handles) else None

    def keep(
        self,
        unit: UnitPlan,
        numbers: Sequence[int],
        comms: Sequence[BufferComm],
        shards: Sequence[torch.Tensor],
        handles: Sequence[AnyGatherHandle | None],
    ) -> list[SharedGatherHandle | None]:
        """Keep the buffers of a unit; return handles for any number of uses."""
        shared = [None if handle is None else SharedGatherHandle.of(handle) for handle in handles]
        kept = KeptUnit(unit, numbers, comms, [version(shard) for shard in shards], shared)
        self.by_leaf.update(dict.fromkeys(numbers, kept))
        return shared

    def drop(self, number: int, *, accumulating: bool) -> None:
        """Drop the unit of a leaf, because the last gradient of that leaf has come.

        Arguments:
            number: the number of the leaf.
            accumulating: whether another micro-batch follows.
        """
        found = self.by_leaf.get(number)
        if found is not None and (found.unit.reshard_after_backward or not accumulating):
            # Why all its buffers: see ``ShardToLeaves.backward``.
            for other in found.numbers:
                self.by_leaf.pop(other, None)

    def end_backward(self, *, accumulating: bool) -> None:
        """Drop all units that do not stay gathered until the next micro-batch."""
        stays = {n: kept for n, kept in self.by_leaf.items() if accumulating and not kept.unit.reshard_after_backward}
        self.by_leaf = stays

    def clear(self) -> None:
        """Drop all units."""
        self.by_leaf = {}
