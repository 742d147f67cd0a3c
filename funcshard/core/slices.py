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
from funcshard.core.prefetcher import Prefetcher, SavedUnit, UnitSource
from funcshard.plan import UnitPlan

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
        BufferComm(
            Topology(near, sharded=True),
            unit.name,
            comm.buffer,
            CommDtypes(),
            label=f"slices of {comm.label}",
        )
        if comm.topology.cut
        else None
        for comm in comms
    )


def save_unit(
    slices: SliceComms, f: Any, shard: Mapping[str, torch.Tensor], prefetcher: Prefetcher | None
) -> SavedUnit:
    """Return the state that one forward of a unit keeps for backward.

    A forward that backward computes again is followed by its backward at once, and has no slices.
    """
    if graph_task_id() == -1:
        return SlicedUnit(f, slices, shard, prefetcher)
    return SavedUnit(f, shard, prefetcher)


class _SlicedSource(UnitSource):
    """What backward gathers a unit from: slices that this rank holds, and buffers that are not cut.

    Arguments:
        f: see ``UnitSource``, like ``shard``.
        shard: this rank's shard.
        comms: the communication of the slices.
    """

    __slots__ = ("_slice_comms", "slices")

    repeats = False  # so that the slices are free as soon as backward has used them

    def __init__(self, f: Any, shard: Mapping[str, torch.Tensor], comms: SliceComms) -> None:
        super().__init__(f, shard)
        self._slice_comms = comms
        self.slices: list[torch.Tensor | None] | None = None

    @property
    def changed(self) -> bool:
        """Whether a shard has been written to; it does not matter if all buffers have slices."""
        return (self.slices is None or None in self.slices) and super().changed

    def sources(self) -> list[GatherSource]:
        """Return the sources of the unit's all-gather."""
        shard_sources = super().sources()
        if self.slices is None:
            return shard_sources
        return [
            source if part is None or comm is None else (part, comm)
            for source, part, comm in zip(
                shard_sources, self.slices, self._slice_comms, strict=True
            )
        ]


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
        self,
        f: Any,
        slice_comms: SliceComms,
        shard: Mapping[str, torch.Tensor],
        prefetcher: Prefetcher | None,
    ) -> None:
        self._slice_comms, self._slices = slice_comms, _SlicedSource(f, shard, slice_comms)
        super().__init__(f, shard, prefetcher, self._slices)

    def post_forward(self, gathered: Sequence[Sequence[torch.Tensor]]) -> None:
        """Copy this rank's slices of the gathered buffers, if backward needs the unit."""
        if self.needed:
            self._slices.slices = [
                None if comm is None else _slice_of(leaves[0], buffer.padded_numel, comm)
                for leaves, buffer, comm in zip(
                    gathered, self._unit.buffers, self._slice_comms, strict=True
                )
            ]


@unseen
def _slice_of(leaf: torch.Tensor, numel: int, comm: BufferComm) -> torch.Tensor:
    """Return a copy of this rank's slice of the gathered buffer whose first leaf is ``leaf``."""
    group = comm.mesh.shard
    slices = leaf.detach().as_strided(
        (group.size, numel // group.size), (numel // group.size, 1), leaf.storage_offset()
    )
    return own_row(slices, group, "shard")
