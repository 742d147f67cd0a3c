"""Collectives on plain tensors, without autograd, for optimizer state, norms and the like.

The public ones, which are differentiable, are in ``collectives``.
"""

from __future__ import annotations

import torch

from funcshard.comm import Mesh, Topology
from funcshard.core.buffer_comm import BufferComm, start_gather, start_reduce
from funcshard.core.grad_reducer import note_collective


def all_gather_flat(
    flat: torch.Tensor,
    mesh: Mesh,
    *,
    unit: str | None = None,
    buffer: str = "",
    sharded: bool = True,
    offload: bool = False,
) -> torch.Tensor:
    """Return the concatenation of every rank's ``flat`` along the shard axis, without autograd.

    Arguments:
        flat: this rank's slice ``[n]``, of any dtype.
        mesh: the ranks.
        unit: name of the unit that the data belongs to, for events and errors.
        buffer: key of the unit's buffer, likewise.
        sharded: whether ``flat`` is a slice. If not, the function returns ``flat`` itself.
        offload: whether ``flat`` is on the CPU although the mesh's device is another.

    Returns:
        The whole ``[n * ranks]``; ``flat`` itself if there is nothing to gather.
    """
    note_collective(mesh)
    comm = BufferComm(Topology(mesh, sharded), unit, buffer, offload=offload)
    with torch.no_grad():
        return start_gather(flat.detach(), comm).finish()


def all_reduce_flat(
    tensor: torch.Tensor, mesh: Mesh, *, local: tuple[str, ...] = ()
) -> torch.Tensor:
    """Return the sum of ``tensor`` over all mesh axes except ``local``, without autograd.

    ``tensor`` may be overwritten.
    """
    note_collective(mesh)
    return start_reduce(tensor, BufferComm(Topology(mesh, False, local)), donated=True).finish()
