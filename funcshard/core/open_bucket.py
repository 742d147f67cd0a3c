"""A small bucket that stays gathered: one autograd node for the leaves of all of its units.

``unshard`` makes an autograd node for each unit. For a hundred tiny units the nodes take longer than
the computation. The units of an ``OpenBucket`` share one: it is made when forward calls the first
of them, and its backward runs when the gradients of all of them are complete, which is when the
bucket is reduced. Until then the whole bucket stays in memory, so it has to be small.

Only units that stay gathered between forward and backward run so. A unit that forward calls a second
time, that a checkpoint computes again, or that is called under a transform has a node of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from funcshard._utils import dispatch_modes, in_selective_checkpoint, version
from funcshard.core.basis import noted_outer
from funcshard.core.buffer_comm import AnyGatherHandle, BufferComm, start_gather
from funcshard.core.flat_buffer import (
    AllGather,
    LeafViews,
    ReduceScatter,
    Unflatten,
    flatten_gradients,
    gradient_parts,
    views_at,
)
from funcshard.core.grad_reducer import GradReducer, current_reducer
from funcshard.core.group import grad_mode
from funcshard.core.prefetcher import Handles, SavedUnit, current_unit, hooks_allowed
from funcshard.core.unit import Unshard, copy_aliased_outputs
from funcshard.plan import BUCKET_BYTES, BufferPlan, gathered_bytes

__all__ = ["OpenBucket", "can_open_buckets", "open_bucket", "opens"]

_log = logging.getLogger("funcshard.core")

UnitShard = Mapping[str, torch.Tensor]


@dataclass(slots=True, eq=False)
class _Column:
    """One buffer of one unit.

    Attributes:
        comm: its communication.
        buffer: its plan.
        where: the ``leaf_views`` of the buffer.
        handle: its all-gather; ``None`` if it needs none.
        number: the number of its shard among the reducer's leaves; ``None`` if it is none.
    """

    comm: BufferComm
    buffer: BufferPlan
    where: LeafViews
    handle: AnyGatherHandle | None
    number: int | None

    def views(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return the leaves, and drop the all-gather."""
        full = (self.handle or start_gather(shard, self.comm)).finish()
        self.handle = None
        return views_at(full, self.where)


class _LateSaved:
    """A unit that stays gathered, for a checkpoint inside it; makes the ``SavedUnit`` if asked.

    Arguments:
        f: the function of the unit.
        shard: this rank's shard of the unit.
        reducer: the reducer of the gradients, if there is one.
    """

    __slots__ = ("_f", "_reducer", "_saved", "_shard", "_versions")

    def __init__(self, f: Unshard, shard: UnitShard, reducer: GradReducer | None) -> None:
        self._f, self._shard, self._reducer = f, shard, reducer
        self._versions = [version(shard[comm.buffer]) for comm in f.comms]
        self._saved: SavedUnit | None = None

    def leaves(self) -> list[torch.Tensor]:
        """Return the leaves, gathered again if need be; see ``SavedUnit.leaves``."""
        if self._saved is None:
            self._saved = SavedUnit(self._f, self._shard, None, versions=self._versions)
            self._saved.kept = None if self._reducer is None else self._f.kept_by(self._reducer, self._shard)
        return self._saved.leaves()

    def release(self) -> None:
        """Free the buffers that a checkpoint has gathered."""
        if self._saved is not None:
            self._saved.release()


@dataclass(slots=True, eq=False)
class _OpenUnit:
    """One unit of an open bucket.

    Attributes:
        f: the function of the unit.
        shard: this rank's shard of the unit.
        columns: its buffers.
        saved: its state for a checkpoint inside it.
        called: whether forward has called it.
        leaves: its leaves, until forward calls it.
        heads: the first leaf of each buffer, likewise.
    """

    f: Unshard
    shard: UnitShard
    columns: list[_Column]
    saved: _LateSaved | None
    called: bool = False
    leaves: list[torch.Tensor] = field(default_factory=list)
    heads: list[tuple[torch.Tensor]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class OpenBucket:
    """The gathered leaves of a bucket, while forward calls its units.

    Attributes:
        mode: the ``grad_mode`` that the leaves were gathered in.
        reducer: the reducer of the gradients, if there is one.
        units: the units that forward has not called, by name.
        order: the units that forward has called, in that order.
    """

    mode: tuple[bool, bool]
    reducer: GradReducer | None
    units: dict[str, _OpenUnit]
    order: list[_OpenUnit]

    def has(self, name: str, shard: UnitShard) -> bool:
        """Return whether the leaves of a unit with this shard are here for its call."""
        unit = self.units.get(name)
        return unit is not None and unit.shard is shard

    def run(self, name: str, f: Unshard, /, *args: Any, **kwargs: Any) -> Any:
        """Run a unit with its gathered leaves, which are no longer here afterwards."""
        unit = self.units.pop(name)
        self.order.append(unit)
        reducer = self.reducer
        if reducer is not None and self.mode[0]:
            for column in unit.columns:
                if column.number is not None:
                    reducer.expect(column.number, column.comm)
        leaves, heads = unit.leaves, unit.heads
        unit.leaves, unit.heads = [], []
        token = current_unit.set(unit.saved)
        try:
            result = f.run_with(f.apply, leaves, heads, args, kwargs)
            return copy_aliased_outputs(result, heads, None)
        finally:
            current_unit.reset(token)


def opens(fs: Sequence[Unshard]) -> bool:
    """Return whether the units of a bucket may share an autograd node."""
    small = sum(gathered_bytes(f.unit) for f in fs) <= BUCKET_BYTES
    return small and all(f.trainable and not f.unit.reshard_after_forward and f.dtensors is None for f in fs)


def can_open_buckets() -> bool:
    """Return whether a unit that runs now may share an autograd node with its bucket."""
    if torch.is_inference_mode_enabled() or not hooks_allowed() or (dispatch_modes() and in_selective_checkpoint()):
        return False
    reducer = current_reducer()
    return reducer is None or not reducer.has_gathered


def open_bucket(units: Mapping[str, tuple[Unshard, UnitShard, Handles]]) -> OpenBucket:
    """Gather the units of a bucket for a call that runs the first of them.

    Arguments:
        units: the function, the shard and the started all-gathers of each unit that the call has
            gathered and not run, by name.
    """
    mode, reducer = grad_mode(), current_reducer()
    opened = {name: _opened(f, shard, handles, reducer, grad=mode[0]) for name, (f, shard, handles) in units.items()}
    bucket = OpenBucket(mode, reducer, opened, [])
    columns, shards = [], []
    for unit in opened.values():
        for column in unit.columns:
            shard = unit.shard[column.buffer.key]
            if mode[0] and column.buffer.trainable and shard.requires_grad:
                columns.append(column)
                shards.append(shard)
    found = iter(_GatherLeavesOfUnits.apply(columns, bucket.order, reducer, *shards) if columns else ())
    own = {id(column) for column in columns}
    for unit in opened.values():
        for column in unit.columns:
            if id(column) in own:
                leaves = [next(found) for _ in column.where]
            else:
                with torch.no_grad():
                    leaves = column.views(unit.shard[column.buffer.key].detach())
            unit.leaves += leaves
            unit.heads.append((leaves[0],))
    return bucket


def _opened(f: Unshard, shard: UnitShard, handles: Handles, reducer: GradReducer | None, *, grad: bool) -> _OpenUnit:
    columns = []
    if grad and reducer is not None:
        handles = f.stay_gathered(shard, handles, needed=True) or handles
    number = None
    for buffer, comm, where, handle in zip(f.unit.buffers, f.comms, f.leaf_views, handles, strict=True):
        if reducer is not None:
            local = shard[buffer.key]
            reducer.note_gather(local, f.mesh, f.unit.name, buffer)
            number = reducer.number_of(local) if buffer.trainable else None
        columns.append(_Column(comm, buffer, where, handle, number))
    return _OpenUnit(f, shard, columns, _LateSaved(f, shard, reducer) if grad else None)


class _GatherLeavesOfUnits(torch.autograd.Function):
    """``flat_buffer._GatherLeaves`` for several buffers as one node.

    The columns that ``apply`` is given are those of ``order``, to which forward adds units as it
    calls them. Backward hands over the gradients of these alone, the last unit first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        columns: Sequence[_Column],
        order: list[_OpenUnit],
        reducer: GradReducer | None,
        *shards: torch.Tensor,
    ) -> Any:
        ctx.columns, ctx.order, ctx.reducer = columns, order, reducer
        ctx.comms = [noted_outer(column.comm) if column.number is None else column.comm for column in columns]
        ctx.set_materialize_grads(False)
        ctx.device = columns[0].comm.mesh.device
        return tuple([leaf for column, shard in zip(columns, shards, strict=True) for leaf in column.views(shard)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        found: dict[int, tuple[int, Sequence[torch.Tensor | None]]] = {}
        begin = 0
        for number, column in enumerate(ctx.columns):
            own = grads[begin : begin + len(column.where)]
            begin += len(own)
            if any([grad is not None for grad in own]):
                found[id(column)] = number, own
        result: list[torch.Tensor | None] = [None] * len(ctx.columns)
        reduced: list[tuple[int, list[torch.Tensor], BufferComm]] = []
        reducer = ctx.reducer if ctx.reducer is not None and ctx.reducer.in_backward else None
        for unit in reversed(ctx.order):
            unit.saved.release()
            for column in reversed(unit.columns):
                if id(column) not in found:
                    continue
                number, own = found[id(column)]
                if reducer is not None and column.number is not None:
                    reduced.append((column.number, gradient_parts(column.buffer, ctx.device, own), column.comm))
                else:
                    flat = flatten_gradients(column.buffer, ctx.device, own)
                    result[number] = ReduceScatter.apply(flat, ctx.comms[number])
        if reducer is not None:
            reducer.add_together(reduced)
        return None, None, None, *result

    @staticmethod
    def jvp(ctx: Any, _columns: None, _order: None, _reducer: None, *shards: torch.Tensor | None) -> Any:
        leaves: list[Any] = []
        for column, comm, shard in zip(ctx.columns, ctx.comms, shards, strict=True):
            if shard is None:
                leaves += [None] * len(column.where)
            else:
                leaves += Unflatten.apply(AllGather.apply(shard, comm.plain, None, None), column.buffer)
        return tuple(leaves)
