"""Collectives as operations of a graph, while ``fs.trace`` records a step.

A collective writes into memory that torch's tracers do not see change. So ``in_graph`` puts a
``RecordedGroup`` in the place of a group, which communicates nothing. Each collective becomes an
operation that starts it, such as ``funcshard::all_gather``, and ``funcshard::wait``. Their
arguments name no process group, and a rank's position is an operation too, so the graph is the same
on all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from funcshard.comm.group import DeferredWork, Group, Op, Work, WrappedGroup
from funcshard.comm.mesh import Mesh
from funcshard.comm.user_collectives import CustomGroup
from funcshard.plan import current_recording

# --- the operations -------------------------------------------------------------------------------

_WHERE = "str? unit, str buffer, str axis, int ranks, str label"
_RANKS = 3  # position of ``ranks`` among these


def _new(
    shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    # Why not new_empty or empty_like: of a constant, they would make a constant.
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def _scattered(
    parts: Sequence[torch.Tensor], dtype: torch.dtype, *where: Any
) -> torch.Tensor:
    return _new((sum(part.numel() for part in parts) // where[_RANKS],), parts[0], dtype)


# The arguments and results of each operation, and a function that gives a result without values.
_OPERATIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "all_gather": (
        f"(Tensor shard, bool shared, {_WHERE}) -> Tensor",
        lambda shard, _, *where: _new(
            (shard.shape[0] * where[_RANKS], *shard.shape[1:]), shard
        ),
    ),
    "reduce_scatter": (
        f"(Tensor[] parts, ScalarType dtype, {_WHERE}) -> Tensor",
        _scattered,
    ),
    "all_reduce": (f"(Tensor tensor, {_WHERE}) -> Tensor", lambda x, *_: _new(x.shape, x)),
    "broadcast": (
        f"(Tensor tensor, SymInt src, {_WHERE}) -> Tensor",
        lambda x, *_: _new(x.shape, x),
    ),
    "all_to_all": (
        f"(Tensor full, SymInt[] out_sizes, SymInt[] sizes, {_WHERE}) -> Tensor",
        lambda full, out_sizes, *_: _new((sum(out_sizes),), full),
    ),
    "wait": ("(Tensor pending) -> Tensor", lambda pending: _new(pending.shape, pending)),
    "number": (
        "(int index, SymInt steps) -> Tensor",
        lambda *_: torch.empty((), dtype=torch.float64, device="cpu"),
    ),
    "phase": ("(str name) -> ()", lambda name: None),
    "coordinate": (
        "(str axis, int ranks) -> Tensor",
        lambda *_: torch.empty((), dtype=torch.int64, device="cpu"),
    ),
}
for _name, (_schema, _result) in _OPERATIONS.items():
    # Why this tag: the result depends on other ranks, so that torch must neither compute a constant
    # of it, nor take one operation for another with the same arguments.
    # Why not these three: two calls with equal arguments have the same result on a rank.
    _tags = (
        ()
        if _name in ("wait", "number", "coordinate")
        else (torch.Tag.nondeterministic_seeded,)
    )
    torch.library.define(f"funcshard::{_name}", _schema, tags=_tags)
    torch.library.register_fake(f"funcshard::{_name}", _result)


# --- the group ------------------------------------------------------------------------------------


def in_graph(group: Group, axis: str, unit: str | None = None, buffer: str = "") -> Group:
    """Return ``group``, or one whose collectives become operations while ``fs.trace`` records.

    Arguments:
        group: the ranks along an axis; functions of ``with_collectives`` stay.
        axis: name of the axis.
        unit: name of the unit that communicates, if any.
        buffer: key of the unit's buffer.
    """
    if current_recording() is None:
        return group
    if isinstance(group, CustomGroup):
        return dataclasses.replace(
            group, inner=RecordedGroup(group.inner, axis, unit, buffer)
        )
    return RecordedGroup(group, axis, unit, buffer)


@dataclass(frozen=True, slots=True)
class RecordedGroup(WrappedGroup):
    """The ranks along an axis, whose collectives are recorded and do not run.

    Attributes:
        axis: name of the axis.
        unit: name of the unit that communicates, if any.
        buffer: key of the unit's buffer.
    """

    axis: str
    unit: str | None = None
    buffer: str = ""

    def empty(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        # Why not the inner group's: a tracer doesn't see a tensor made of pool memory.
        return like.new_empty(numel)

    def start(self, op: Op) -> Work:
        if op.kind == "all_gather_text":
            # Why: ranks that trace one step exchange nothing. Each compares with itself, and a run
            # of the graph compares the ranks again.
            return DeferredWork(result=[op.data] * self.size)
        kind, out, arguments = op.kind.removesuffix("_shared"), op.out, [op.data]
        if kind == "all_gather":
            # Whether memory is shared is decided when the graph runs.
            arguments += [out is None]
        elif kind == "reduce_scatter":
            arguments = [list(op.data), out.dtype]
        elif kind == "all_to_all":
            arguments += [list(op.out_sizes), list(op.sizes)]
        elif kind == "broadcast":
            arguments = [out, op.src]
        else:
            arguments = [out]
        operations = torch.ops.funcshard
        pending = getattr(operations, kind)(*arguments, *self._where(op.label))

        def finish() -> torch.Tensor:
            with torch.no_grad():
                waited_tensor: torch.Tensor = operations.wait(pending)
                if out is not None:
                    out.copy_(waited_tensor.view(out.shape))
            return waited_tensor

        return DeferredWork(finish)

    def shares(self, shard: torch.Tensor) -> bool:
        return shard.ndim == 1  # the operation gathers along dim 0

    def _where(self, label: str) -> tuple[str | None, str, str, int, str]:
        recording = current_recording()
        assert recording is not None, "a RecordedGroup lives as long as the recording"
        recording.start()
        return self.unit, self.buffer, self.axis, self.size, label


# --- the rank's position --------------------------------------------------------------------------


def own_row(rows: torch.Tensor, group: Group, axis: str) -> torch.Tensor:
    """Return a copy of this rank's row of ``rows``, of which each rank of the group has one."""
    if current_recording() is None:
        return rows[group.rank].clone()
    row_index = torch.ops.funcshard.coordinate(axis, group.size)
    # Why not blocking: the host would wait for all that the device has been given.
    row_index = row_index.to(rows.device, non_blocking=True)
    return rows.index_select(0, row_index.reshape(1))[0]


def at_own_rank(value: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return one number for each rank of the mesh: ``value`` at this rank, and zeros elsewhere."""
    of_ranks = value.new_zeros(mesh.world_size)
    if current_recording() is None:
        of_ranks[mesh.rank] = value
        return of_ranks
    rank_number = torch.zeros((), dtype=torch.int64, device="cpu")
    for axis, group in mesh.groups.items():
        if group.size > 1:
            rank_number = rank_number * group.size + torch.ops.funcshard.coordinate(
                axis, group.size
            )
    # Why no index: a rank's number must not become a constant of the graph.
    rank_number = rank_number.to(value.device, non_blocking=True)
    is_own = torch.arange(mesh.world_size, device=value.device) == rank_number
    return torch.where(is_own, value, of_ranks)
