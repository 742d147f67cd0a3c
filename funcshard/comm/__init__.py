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

from funcshard.comm.desync import DesyncDetector
from funcshard.comm.group import (
    DONE,
    AllGatherWork,
    Group,
    PrivateAllGatherWork,
    Work,
    all_gather_private,
    concatenate,
    slice_parts,
    sum_in_rank_order,
)
from funcshard.comm.mesh import Mesh, all_gather_texts, check_same, init_mesh
from funcshard.comm.simulation import simulate

__all__ = [
    "DONE",
    "PrivateAllGatherWork",
    "AllGatherWork",
    "Group",
    "DesyncDetector",
    "Mesh",
    "Work",
    "sum_in_rank_order",
    "slice_parts",
    "check_same",
    "all_gather_texts",
    "all_gather_private",
    "init_mesh",
    "concatenate",
    "simulate",
]
