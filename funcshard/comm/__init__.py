"""Ranks and collectives on plain tensors.

- ``group``: what a group of ranks can do.
- ``gloo``: collectives over gloo.
- ``native``: collectives of other backends, such as NCCL.
- ``desync``: finds ranks that issue different collectives.
- ``torch_group``: a group over a torch process group.
- ``mesh``: ``Mesh``, ``init_mesh``.
- ``simulation``: ``simulate``: ranks as threads of one process.
- ``shm``: shared memory, a wing of its own (skippable).
"""

from __future__ import annotations

from funcshard.comm.desync import Journal
from funcshard.comm.group import DONE, Apart, Gathered, Group, Work, add_in_order, between, gathered_apart, side_by_side
from funcshard.comm.mesh import Mesh, check_same, everyones, init_mesh
from funcshard.comm.simulation import simulate

__all__ = [
    "DONE",
    "Apart",
    "Gathered",
    "Group",
    "Journal",
    "Mesh",
    "Work",
    "add_in_order",
    "between",
    "check_same",
    "everyones",
    "gathered_apart",
    "init_mesh",
    "side_by_side",
    "simulate",
]
