"""Ranks, and collectives on plain tensors; nothing here knows of units or autograd.

Read ``group`` and ``mesh`` first. The other files are different ways to run a group's collectives.

- ``group``: ``Group``, the ranks along a mesh axis and their collectives; ``LocalGroup``, one rank;
  ``WrappedGroup``, to change single collectives of another group.
- ``mesh``: ``Mesh``, the ranks as a grid with named axes, and ``init_mesh``; the axes along which
  a buffer is cut or repeated, and its dtypes on the way.
- ``job``: the process's start under torchrun, and the process groups of a mesh, whose ranks check
  together that they make the same one.
- ``attempts``: how a rank whose step has failed catches up with the others.
- ``agreement``: checks that all ranks pass the same arguments.
- ``user_collectives``: ``with_collectives``, the user's own functions for the data of units.
- ``recorded_group``: collectives, and the rank's position, as operations of the graph that
  ``fs.trace`` records.
- ``simulation``: ``simulate``, which runs ranks as threads of one process. ``varying``: its
  ``check_vma``.
- ``torch_group``: ``TorchGroup``, a group over a ``torch.distributed`` process group.
  ``process_groups``: its collectives over gloo, and over NCCL and every other backend.
- ``desync``: ``DesyncDetector``, which finds ranks that issue different collectives. ``watch``:
  ``Watch``, which finds out why a rank waits in vain.
- ``shm``: a wing inside this one: collectives through shared memory, on the CPUs of one machine.
"""

from __future__ import annotations

# desync and group come before mesh, which imports shm, which imports them from here.
from funcshard.comm.agreement import (
    all_gather_texts,
    around_difference,
    check_all_same,
    check_once,
    first_difference,
    text_of,
)
from funcshard.comm.attempts import AGREEMENT, UNDO, AttemptLog
from funcshard.comm.desync import DesyncDetector
from funcshard.comm.group import (
    DONE,
    DeferredWork,
    Group,
    Op,
    PrivateAllGatherWork,
    Work,
    WrappedGroup,
    all_gather_private,
    concatenate,
    slice_parts,
    sum_in_rank_order,
)
from funcshard.comm.mesh import (
    CommDtypes,
    Mesh,
    Topology,
    find_lost_rank,
    init_mesh,
    neighbours,
    ranks_of_job,
    remade,
)
from funcshard.comm.recorded_group import RecordedGroup, at_own_rank, in_graph, own_row
from funcshard.comm.simulation import simulate
from funcshard.comm.user_collectives import (
    CustomGroup,
    with_collectives,
    without_collectives,
)

__all__ = [
    "AGREEMENT",
    "UNDO",
    "DONE",
    "AttemptLog",
    "CommDtypes",
    "CustomGroup",
    "DeferredWork",
    "DesyncDetector",
    "Group",
    "Mesh",
    "Op",
    "PrivateAllGatherWork",
    "RecordedGroup",
    "Topology",
    "Work",
    "WrappedGroup",
    "all_gather_private",
    "all_gather_texts",
    "around_difference",
    "at_own_rank",
    "check_all_same",
    "check_once",
    "concatenate",
    "find_lost_rank",
    "first_difference",
    "in_graph",
    "init_mesh",
    "neighbours",
    "own_row",
    "ranks_of_job",
    "remade",
    "simulate",
    "slice_parts",
    "sum_in_rank_order",
    "text_of",
    "with_collectives",
    "without_collectives",
]
