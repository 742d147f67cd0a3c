"""Slices of gathered buffers, which a few ranks hold between forward and backward.

After its forward, a unit with ``reshard_after_forward=n`` is cut into ``n`` slices, one on each of
``n`` neighbours on the shard axis, such as the ranks of one machine. Backward gathers the slices
from these ranks alone. They are cut from the gathered buffer, so they have the dtype to compute in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from funcshard._utils import graph_task_id, unseen
from funcshard.comm import CommDtypes, Mesh, Topology, neighbours, own_row
from funcshard.core.buffer_comm import BufferComm, GatherSource
from funcshard.core.prefetcher import Prefetcher, SavedUnit
from funcshard.plan import UnitPlan

__all__ = ["SliceComms", "SlicedUnit", "save_unit", "slice_comms"]

# The communication of the slices of each buffer; None for a buffer that is not cut.
SliceComms = tuple[BufferComm | None, ...]


def slice_comms(unit: UnitPlan, mesh: Mesh, comms: Sequence[BufferComm]) -> SliceComms:
    """Return the communication of a unit's slices; ``()`` if the unit is not cut into slices.

    Every rank of the mesh has to call this, because the first call makes process groups.
    """
    if unit.post_forward_ranks is None:
        return ()
    near = neighbours(mesh, unit.post_forward_ranks)
    return tuple(
        BufferComm(Topology(near, sharded=True), unit.name, comm.buffer, CommDtypes(), label=f"slices of {comm.label}")
        if comm.topology.cut
        else None
        for comm in comms
    )


def save_unit(slices: SliceComms, f: Any, shard: Mapping[str, torch.Tensor], prefetcher: Prefetcher | None) -> SavedUnit:
    """Return the state that one forward of a unit keeps for backward.

    A forward that backward computes again is followed by its backward at once, and has no slices.
    """
    if graph_task_id() == -1:
        return SlicedUnit(f, slices, shard, prefetcher)
    return SavedUnit(f, shard, prefetcher)


class SlicedUnit(SavedUnit):
    """The saved state of a unit of which this rank holds slices, for backward to gather.

    Arguments:
        f: see ``SavedUnit``, like the other arguments.
        slice_comms: the communication of the slices.
        shard: this rank's shard.
        prefetcher: that of the call.
    """

    __slots__ = ("_slice_comms", "_slices")

    def __init__(
        self, f: Any, slice_comms: SliceComms, shard: Mapping[str, torch.Tensor], prefetcher: Prefetcher | None
    ) -> None:
        super().__init__(f, shard, prefetcher)
        self._slice_comms = slice_comms
        self._slices: list[torch.Tensor | None] | None = None

    def post_forward(self, gathered: Sequence[Sequence[torch.Tensor]]) -> None:
        """Copy this rank's slices of the gathered buffers, if backward needs the unit."""
        if self.needed:
            self._slices = [
                None if comm is None else _slice_of(leaves[0], buffer.padded_numel, comm)
                for leaves, buffer, comm in zip(gathered, self._unit.buffers, self._slice_comms, strict=True)
            ]

    def sources(self) -> list[GatherSource]:
        """Return the sources of its all-gather: slices, and shards of buffers that are not cut."""
        if self._slices is None:
            return super().sources()
        # Why not all of them: a change of the shards after forward does not reach the slices.
        found: Sequence[GatherSource] = super().sources() if None in self._slices else [None] * len(self._slices)
        return [
            source if part is None or comm is None else (part, comm)
            for source, part, comm in zip(found, self._slices, self._slice_comms, strict=True)
        ]


@unseen
def _slice_of(leaf: torch.Tensor, numel: int, comm: BufferComm) -> torch.Tensor:
    """Return a copy of this rank's slice of the gathered buffer whose first leaf is ``leaf``."""
    group = comm.mesh.shard
    slices = leaf.detach().as_strided((group.size, numel // group.size), (numel // group.size, 1), leaf.storage_offset())
    return own_row(slices, group, "shard")
