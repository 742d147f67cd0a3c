"""Slices of gathered buffers, which a few ranks hold between forward and backward.

After its forward, a unit with ``reshard_after_forward=n`` is cut into ``n`` slices, one on each of
``n`` neighbours on the shard axis, such as the ranks of one machine. Backward gathers the slices
from these ranks alone. They are cut from the gathered buffer, so they have the dtype to compute in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from funcshard._utils import unseen
from funcshard.comm import CommDtypes, Mesh, Topology, neighbours, own_row
from funcshard.core.buffer_comm import BufferComm
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


@unseen
def slice_of(leaf: torch.Tensor, numel: int, comm: BufferComm) -> torch.Tensor:
    """Return a copy of this rank's slice of the gathered buffer whose first leaf is ``leaf``."""
    group = comm.mesh.shard
    slices = leaf.detach().as_strided(
        (group.size, numel // group.size), (numel // group.size, 1), leaf.storage_offset()
    )
    return own_row(slices, group, "shard")
