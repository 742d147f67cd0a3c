"""A small bucket that stays gathered: one autograd node for the leaves of all of its units.

``unshard`` makes an autograd node for each unit. For a hundred tiny units the nodes take longer
than the computation. The units of a ``SmallBucket`` share one. It is made when forward calls the
first of them, and its backward runs when the gradients of all of them are complete; then the bucket
is reduced. Until then the whole bucket stays in memory, so it has to be small.

Only units that stay gathered between forward and backward run so, and each at most once in a call.
A unit that a checkpoint computes again, or that is called under a transform, has a node of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    gather_leaves,
    gradient_parts,
    views_at,
)
from funcshard.core.grad_reducer import GradReducer, current_reducer
from funcshard.core.group import grad_mode
from funcshard.core.prefetcher import Handles, SavedUnit, UnitSource, current_unit, hooks_allowed
from funcshard.core.unit import Unshard, copy_aliased_outputs
from funcshard.plan import BUCKET_BYTES, BufferPlan, gathered_bytes

__all__ = ["OpenBucket", "SmallBucket", "can_open_buckets"]

UnitShard = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Column:
    """One buffer of one unit, and how it is communicated."""

    key: str
    buffer: BufferPlan
    comm: BufferComm
    where: LeafViews
    padding: int


@dataclass(frozen=True, slots=True, eq=False)
class SmallBucket:
    """The units of a bucket that share an autograd node.

    Attributes:
        names: the units, in plan order.
        units: the function and the buffers of each unit.
    """

    names: tuple[str, ...]
    units: dict[str, tuple[Unshard, tuple[_Column, ...]]]

    @classmethod
    def of(cls, units: Mapping[str, Unshard]) -> SmallBucket | None:
        """Return the units of a bucket, as one; ``None`` if each needs a node of its own."""
        if sum(gathered_bytes(f.unit) for f in units.values()) > BUCKET_BYTES:
            return None
        if not all(f.trainable and not f.unit.reshard_after_forward and f.dtensors is None for f in units.values()):
            return None
        found = {}
        for name, f in units.items():
            columns = zip(f.unit.buffers, f.comms, f.leaf_views, strict=True)
            found[name] = f, tuple([_Column(b.key, b, comm, where, b.padded_numel - b.numel) for b, comm, where in columns])
        return cls(tuple(units), found)

    def open(self, shards: Mapping[str, UnitShard], handles: Mapping[str, Handles]) -> OpenBucket:
        """Gather units for a call that runs the first of them.

        Arguments:
            shards: this rank's shard of each unit of the call.
            handles: the started all-gathers of the units that the call has gathered and not run.
        """
        mode, reducer = grad_mode(), current_reducer()
        bucket = OpenBucket(mode, reducer, {}, [])
        in_node: list[tuple[_OpenUnit, int]] = []
        own: list[torch.Tensor] = []
        keeps = mode[0] and reducer is not None
        fresh = reducer is not None and not reducer.kept.by_leaf
        for name, started in handles.items():
            (f, columns), shard = self.units[name], shards[name]
            unit = bucket.units[name] = _OpenUnit(f, columns, shard, reducer)
            if reducer is not None:
                unit.numbers = [reducer.number_of(shard[column.key]) for column in columns]
                for column in columns:
                    reducer.note_gather(shard[column.key], f.mesh, name, column.buffer)
                if keeps and not fresh:
                    started = f.stay_gathered(shard, started, needed=True) or started
                elif keeps and any(started):
                    started = reducer.keep_new(f.unit, unit.numbers, f.comms, unit.versions, started)
            unit.handles = started
            for i, column in enumerate(columns):
                local = shard[column.key]
                if mode[0] and column.buffer.trainable and local.requires_grad:
                    in_node.append((unit, i))
                    own.append(local)
                else:
                    local = local if column.buffer.trainable else local.detach()
                    unit.gathered[i] = gather_leaves(local, column.comm, column.buffer, column.where, None, started[i])
        if in_node:
            leaves = _GatherLeavesOfUnits.apply(in_node, bucket.order, reducer, *own)
            begin = 0
            for unit, i in in_node:
                end = begin + len(unit.columns[i].where)
                unit.gathered[i] = leaves[begin:end]
                begin = end
        return bucket


class _OpenUnit:
    """One unit of an open bucket; also its state for a checkpoint inside it, as ``SavedUnit`` is.

    Arguments:
        f: the function of the unit.
        columns: its buffers.
        shard: this rank's shard of the unit.
        reducer: the reducer of the gradients, if there is one.

    Attributes:
        gathered: the leaves of each buffer, until forward calls the unit.
        handles: its started all-gathers, until then.
        numbers: the number of each shard among the reducer's leaves; ``None`` if it is none.
        versions: how often each shard had been written to when it was gathered.
    """

    __slots__ = ("_reducer", "_saved", "columns", "f", "gathered", "handles", "numbers", "shard", "versions")

    def __init__(self, f: Unshard, columns: tuple[_Column, ...], shard: UnitShard, reducer: GradReducer | None) -> None:
        self.f, self.columns, self.shard, self._reducer = f, columns, shard, reducer
        self.handles: Handles = ()
        self.gathered: list[Sequence[torch.Tensor]] = [()] * len(columns)
        self.numbers: list[int | None] = []
        self.versions = [version(shard[column.key]) for column in columns]
        self._saved: SavedUnit | None = None

    def views(self, i: int, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return the leaves of buffer ``i``, gathered from ``shard``."""
        column = self.columns[i]
        handle: AnyGatherHandle = self.handles[i] or start_gather(shard, column.comm)
        return views_at(handle.finish(), column.where)

    def leaves(self) -> list[torch.Tensor]:
        """Return the leaves, gathered again if need be; see ``SavedUnit.leaves``."""
        if self._saved is None:
            self._saved = SavedUnit(self.f, self.shard, None, UnitSource(self.f, self.shard, self.versions))
            self._saved.kept = None if self._reducer is None else self.f.kept_by(self._reducer, self.shard)
        return self._saved.leaves()

    def release(self) -> None:
        """Free the buffers that a checkpoint has gathered."""
        if self._saved is not None:
            self._saved.release()


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

    def has(self, name: str, shard: UnitShard, mode: tuple[bool, bool]) -> bool:
        """Return whether the leaves of a unit with this shard are here for a call in this mode."""
        unit = self.units.get(name)
        if unit is None or unit.shard is not shard or mode != self.mode or self.reducer is not current_reducer():
            return False
        return hooks_allowed() and not (dispatch_modes() and in_selective_checkpoint())

    def run(self, name: str, f: Unshard, /, *args: Any, **kwargs: Any) -> Any:
        """Run a unit with its gathered leaves, which are no longer here afterwards."""
        unit = self.units.pop(name)
        self.order.append(unit)
        gathered, unit.gathered, unit.handles = unit.gathered, [], ()
        # Why not under no_grad: forward then leaves placeholders in the tables of its modules.
        token = current_unit.set(unit if self.mode[0] else None)
        try:
            leaves = gathered[0] if len(gathered) == 1 else [leaf for leaves in gathered for leaf in leaves]
            return copy_aliased_outputs(f.run_with(f.apply, leaves, gathered, args, kwargs), gathered)
        finally:
            current_unit.reset(token)

    def close(self) -> None:
        """End the bucket's forward: free the leaves of units that were not called."""
        self.units.clear()
        if self.reducer is not None and self.mode[0]:
            self.reducer.expect_together(
                [
                    (number, column.comm)
                    for unit in self.order
                    for number, column in zip(unit.numbers, unit.columns, strict=True)
                    if number is not None and column.buffer.trainable
                ]
            )


def can_open_buckets() -> bool:
    """Return whether a unit that runs now may share an autograd node with its bucket."""
    if torch.is_inference_mode_enabled() or not hooks_allowed():
        return False
    if dispatch_modes() and in_selective_checkpoint():
        return False
    reducer = current_reducer()
    return reducer is None or not reducer.has_gathered


class _GatherLeavesOfUnits(torch.autograd.Function):
    """``flat_buffer._GatherLeaves`` for several buffers as one node.

    Backward hands over the gradients of the units in ``order`` alone, the last unit first. Forward
    adds units to it as it calls them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        buffers: Sequence[tuple[_OpenUnit, int]],
        order: list[_OpenUnit],
        reducer: GradReducer | None,
        *shards: torch.Tensor,
    ) -> Any:
        ctx.buffers, ctx.order, ctx.reducer, ctx.device = buffers, order, reducer, buffers[0][0].f.mesh.device
        ctx.comms = [
            noted_outer(unit.columns[i].comm) if reducer is None or unit.numbers[i] is None else None for unit, i in buffers
        ]
        ctx.set_materialize_grads(False)
        found = []
        for (unit, i), shard in zip(buffers, shards, strict=True):
            found += unit.views(i, shard)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        found: dict[tuple[_OpenUnit, int], tuple[int, Sequence[torch.Tensor | None]]] = {}
        begin = 0
        for position, (unit, i) in enumerate(ctx.buffers):
            end = begin + len(unit.columns[i].where)
            found[unit, i] = position, grads[begin:end]
            begin = end
        result: list[torch.Tensor | None] = [None] * len(ctx.buffers)
        reduced: list[tuple[int, list[torch.Tensor], BufferComm]] = []
        reducer = ctx.reducer if ctx.reducer is not None and ctx.reducer.takes_gradients() else None
        for unit in reversed(ctx.order):
            unit.release()
            for i in reversed(range(len(unit.columns))):
                position, own = found.get((unit, i), (-1, ()))
                if all(grad is None for grad in own):
                    continue
                column, number = unit.columns[i], None if reducer is None else unit.numbers[i]
                if reducer is not None and number is not None:
                    reduced.append((number, _parts(column, own, ctx.device), column.comm))
                else:
                    flat = flatten_gradients(column.buffer, ctx.device, own)
                    result[position] = ReduceScatter.apply(flat, ctx.comms[position] or column.comm)
        if reducer is not None:
            reducer.add_together(reduced)
        return None, None, None, *result

    @staticmethod
    def jvp(ctx: Any, _buffers: None, _order: None, _reducer: None, *shards: torch.Tensor | None) -> Any:
        leaves: list[Any] = []
        for (unit, i), shard in zip(ctx.buffers, shards, strict=True):
            column = unit.columns[i]
            if shard is None:
                leaves += [None] * len(column.where)
            else:
                leaves += Unflatten.apply(AllGather.apply(shard, column.comm.plain), column.buffer)
        return tuple(leaves)


def _parts(column: _Column, grads: Sequence[torch.Tensor | None], device: torch.device) -> list[torch.Tensor]:
    """Return at least two 1-D tensors whose concatenation is the gradient of a buffer."""
    parts = [grad.reshape(-1) for grad in grads if grad is not None]
    plain = 1 < len(parts) == len(grads) and not column.padding
    return parts if plain else gradient_parts(column.buffer, device, grads)
