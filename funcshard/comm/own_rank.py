"""Results that depend on a rank's own position, eagerly and in graphs.

While ``fs.trace`` records a step, a position must not become a constant: the graph is to be the
same on all ranks. So it is the result of an operation, ``funcshard::coordinate``, and all that
depends on it is computed from that tensor. ``funcshard.graph`` runs the operation.
"""

from __future__ import annotations

import torch

from funcshard.comm.group import Group
from funcshard.comm.mesh import Mesh
from funcshard.comm.step_recording import current_recording

torch.library.define("funcshard::coordinate", "(str axis, int ranks) -> Tensor")


@torch.library.register_fake("funcshard::coordinate")
def _(axis: str, ranks: int) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def own_row(rows: torch.Tensor, group: Group, axis: str) -> torch.Tensor:
    """Return a copy of the row of ``rows`` that has this rank's number.

    Arguments:
        rows: a tensor with one row for each rank of the group.
        group: the ranks, along an axis or on a part of it.
        axis: name of the axis.
    """
    if current_recording() is None:
        return rows[group.rank].clone()
    index = torch.ops.funcshard.coordinate(axis, group.size).to(rows.device)
    return rows.index_select(0, index.reshape(1))[0]


def at_own_rank(value: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return one number for each rank of the mesh: ``value`` at this rank, and zeros elsewhere.

    Arguments:
        value: a tensor with one element.
        mesh: the ranks.
    """
    of_ranks = value.new_zeros(mesh.world_size)
    if current_recording() is None:
        of_ranks[mesh.rank] = value
        return of_ranks
    rank = torch.zeros((), dtype=torch.int64, device="cpu")
    for axis, group in mesh.groups.items():
        if group.size > 1:
            rank = rank * group.size + torch.ops.funcshard.coordinate(axis, group.size)
    is_own = torch.arange(mesh.world_size, device=value.device) == rank.to(value.device)
    return torch.where(is_own, value, of_ranks)
