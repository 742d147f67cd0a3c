"""How a function uses the shards that a transform differentiates.

The mean over ranks needs to know over which ranks a function communicates, and by which units it
gathers each shard: whether that is frozen, and along which axes it is local. ``value_and_grad``
finds its leaves by ``id``. A transform wraps them, and ``remat`` takes them out again, so a
``ShardUse`` finds them by the memory below all that.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from funcshard._utils.torch_private import storage_id, unwrapped
from funcshard.comm import Mesh
from funcshard.core.buffer_comm import BufferComm


@dataclass(slots=True, eq=False)
class ShardUse:
    """The units and collectives of the functions that run inside ``noting``.

    Attributes:
        mesh: the mesh over whose ranks the caller takes the mean; ``None`` for that of the
            collectives that are met.
        worlds: the meshes of the units met, by world size; without ``mesh``, those of all other
            collectives too.
        comms: the communication of the shards that units gathered, by their memory.
    """

    mesh: Mesh | None = None
    worlds: dict[int, Mesh] = field(default_factory=dict)
    comms: dict[tuple[int, int], BufferComm] = field(default_factory=dict)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note what happens in the ``with`` block; so do all blocks around it."""
        context_token = _current.set((*_current.get(), self))
        try:
            yield
        finally:
            _current.reset(context_token)

    def note(self, shard: torch.Tensor, comm: BufferComm) -> None:
        """Note that a unit gathers a shard."""
        self.worlds[comm.mesh.world_size] = comm.mesh
        self.comms[_memory(shard)] = comm

    def comm(self, shard: torch.Tensor) -> BufferComm | None:
        """Return the communication of a shard's buffer; ``None`` if no unit has gathered it."""
        return self.comms.get(_memory(shard))


_current: contextvars.ContextVar[tuple[ShardUse, ...]] = contextvars.ContextVar(
    "funcshard_shard_use", default=()
)


def note_shard(shard: torch.Tensor, comm: BufferComm) -> None:
    """Note that a unit gathers a shard, for all functions around it."""
    for use in _current.get():
        use.note(shard, comm)


def note_mesh(mesh: Mesh) -> None:
    """Note a collective of no unit, for all functions around it."""
    for use in _current.get():
        if use.mesh is None:
            use.worlds[mesh.world_size] = mesh


def _memory(shard: torch.Tensor) -> tuple[int, int]:
    shard = unwrapped(shard)
    return storage_id(shard), int(shard.storage_offset())
