"""Gradients of one call of ``value_and_grad``, from backward through reductions to their sums.

``value_and_grad`` makes a ``GradReducer`` and activates it around the user's loss function. A unit
that gathers a shard finds the reducer in a context variable and takes a ``GradSlot``: the reducer,
and the number of the shard among the leaves. In backward the unit hands its unreduced gradient to
the slot's reducer, and autograd goes on while the reduction runs. A reducer lives for one call.

A call may run several forwards and backwards, one for each micro-batch. The reductions of all of
them add up; or, with ``reduce_once``, the unreduced gradients do, and each unit is reduced once.

Why leaves are found by ``id``: the pytree that is differentiated may hold the shards of several
models, so unit and buffer do not name a leaf; and a shard that ``loss_fn`` computes from a leaf has
the leaf's unit and buffer, and must not be taken for it.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from funcshard._utils import graph_task_id
from funcshard.comm import Mesh
from funcshard.core.buffer_comm import AnyReduceHandle, Bucket, BufferComm, start_reduce_parts
from funcshard.plan import BufferPlan, ReduceOrder

__all__ = ["GradReducer", "GradSlot", "OnGrad", "activate", "current_reducer", "note_collective", "take_slot"]

_log = logging.getLogger("funcshard.core")

# Reductions that run at a time. One more waits for the oldest, so that few full gradients exist.
_MOST_RUNNING = 1

# on_grad(unit, buffer, unreduced gradient): see ``GradReducer.reduce_each``.
OnGrad = Callable[[str, BufferPlan, torch.Tensor], None]
_Gradient = tuple[list[torch.Tensor], BufferComm]  # 1-D parts, and how they are reduced


class GradReducer:
    """The leaves that one call differentiates with respect to, and their gradients on the way.

    Made by ``reduce_each``, ``reduce_once`` or ``of_gathered``.

    Attributes:
        leaves: the tensors that the call differentiates with respect to.
        mesh: the mesh over whose ranks the caller takes the mean; ``None`` for that of the
            collectives that are met.
        worlds: the meshes of the units met, by world size; without ``mesh``, those of all other
            collectives too.
        received: whether a gradient has arrived since ``pre_backward``.
        frozen: numbers of the leaves that a plan calls frozen.
        local: mesh, and axes along which values differ, of each leaf that a plan keeps local.
        sums: the reduced gradients, by number of the leaf.
    """

    __slots__ = (
        "_accumulated", "_accumulating", "_gathered", "_handles", "_met", "_needs_leaves_for", "_numbers", "_on_grad",
        "_once", "_order", "_task", "_zero_weight", "frozen", "leaves", "local", "mesh",
        "received", "sums", "worlds",
    )  # fmt: skip

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        *,
        on_grad: OnGrad | None = None,
        once: bool = False,
        needs_leaves_for: str = "",
        gathered: Mapping[int, torch.Tensor] | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.leaves = leaves
        self.mesh = mesh
        self.received = False
        self.worlds: dict[int, Mesh] = {}
        self.frozen: set[int] = set()
        self.local: dict[int, tuple[Mesh, tuple[str, ...]]] = {}
        self.sums: dict[int, torch.Tensor] = {}
        self._on_grad = on_grad
        self._once = once
        self._needs_leaves_for = needs_leaves_for  # the feature that refuses shards computed inside loss_fn
        self._gathered = gathered or {}
        self._numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        self._met: dict[int, tuple[str, BufferPlan]] = {}
        self._task: int | None = None  # autograd's number of this reducer's backward, while that runs
        self._accumulating = False
        self._zero_weight = False
        self._accumulated: dict[int, _Gradient] = {}
        self._order: ReduceOrder[int, Bucket, _Gradient] = ReduceOrder()
        self._handles: list[tuple[list[int], AnyReduceHandle]] = []

    @classmethod
    def reduce_each(
        cls, leaves: Sequence[torch.Tensor], on_grad: OnGrad | None = None, mesh: Mesh | None = None
    ) -> GradReducer:
        """Return a reducer that reduces the gradients of every backward.

        Arguments:
            leaves: the tensors to differentiate with respect to.
            on_grad: called with unit, buffer and unreduced gradient, 1-D, before each reduction; it
                may write to the gradient.
            mesh: see the attribute.
        """
        return cls(leaves, on_grad=on_grad, needs_leaves_for="" if on_grad is None else "on_grads", mesh=mesh)

    @classmethod
    def reduce_once(
        cls, leaves: Sequence[torch.Tensor], on_grad: OnGrad | None = None, mesh: Mesh | None = None
    ) -> GradReducer:
        """Return a reducer that adds up the gradients of all backwards, to reduce them once."""
        needs = "reduce='once'" if on_grad is None else "on_grads"
        return cls(leaves, on_grad=on_grad, once=True, needs_leaves_for=needs, mesh=mesh)

    @classmethod
    def of_gathered(cls, leaves: Sequence[torch.Tensor], gathered: Sequence[torch.Tensor]) -> GradReducer:
        """Return a reducer for leaves that are gathered already.

        A unit that gathers such a leaf receives its gathered buffer.
        """
        return cls(leaves, gathered=dict(enumerate(gathered)))

    def note_collective(self, mesh: Mesh) -> None:
        """Note that the loss function communicates over ``mesh`` other than by gathering a unit."""
        if self.mesh is None:
            self.worlds[mesh.world_size] = mesh

    def note_gather(self, shard: torch.Tensor, mesh: Mesh, unit: str, buffer: BufferPlan) -> torch.Tensor | None:
        """Note that a unit gathers a shard; return the gathered buffer if there is one already.

        Raises:
            ValueError: ``loss_fn`` computed the shard from others, and a feature in use forbids
                that.
        """
        self.worlds[mesh.world_size] = mesh
        number = self._numbers.get(id(shard))
        if number is None:
            if self._needs_leaves_for and buffer.trainable and shard.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{self._needs_leaves_for} needs shards that are gathered as they are; the shard {buffer.key!r} of unit "
                    f"{unit or '(root)'!r} was computed from others inside loss_fn: compute it before, or leave this out"
                )
            return None
        self._met[number] = (unit, buffer)
        if not buffer.trainable:
            self.frozen.add(number)
        if buffer.local:
            self.local[number] = (mesh, buffer.local)
        return self._gathered.get(number)

    def slot(self, shard: torch.Tensor, comm: BufferComm) -> GradSlot | None:
        """Return the slot of ``shard``, and expect its gradient; ``None`` if it is not a leaf."""
        number = self._numbers.get(id(shard))
        if number is None:
            return None
        if self._task is None:
            self._order.expect(number, comm.bucket)
        return GradSlot(self, number)

    @property
    def in_backward(self) -> bool:
        """Whether the reducer's own backward runs, not one inside it, such as a checkpoint's."""
        return self._task is not None and self._task == graph_task_id()

    def pre_backward(self, *, accumulating: bool, zero_weight: bool) -> None:
        """Prepare for the backward of one micro-batch.

        Arguments:
            accumulating: whether another micro-batch follows.
            zero_weight: whether this micro-batch counts nothing, infinities and NaN included.
        """
        self._accumulating = accumulating
        self._zero_weight = zero_weight
        self.received = False

    def enter_backward(self) -> None:
        """Take the backward that runs now as the reducer's own."""
        self._task = graph_task_id()

    def add(self, number: int, parts: list[torch.Tensor], comm: BufferComm) -> None:
        """Take the unreduced gradient of leaf ``number``: the concatenation of 1-D ``parts``."""
        self.received = True
        if self._zero_weight or self._once or self._on_grad is not None or comm.bucket is not None:
            whole = torch.cat(parts)  # a copy, which is held or written to
            parts = [whole if comm.dtypes.reduced is None else whole.to(comm.dtypes.reduced)]
        if self._zero_weight:
            parts[0].nan_to_num_(0.0, 0.0, 0.0)
        more = self._order.arrive(number)
        accumulated = self._accumulated.pop(number, None)
        if accumulated is not None:
            parts = [accumulated[0][0].add_(parts[0])]
        if self._once and (self._accumulating or more):
            self._accumulated[number] = (parts, comm)
        else:
            self._reduce(number, parts, comm)

    def post_backward(self) -> None:
        """End this backward: wait for every reduction."""
        self._task = None
        self._order.end()
        if not self._accumulating:
            for number, (_, comm) in self._accumulated.items():
                if comm.bucket is not None:
                    self._order.hold_for(number, comm.bucket)
            while self._accumulated:
                number = next(iter(self._accumulated))
                self._reduce(number, *self._accumulated.pop(number))
        for group in self._order.rest():
            self._start(group)
        while self._handles:
            self._finish_oldest()
        _log.debug("root post_backward")

    def close(self) -> None:
        """Drop all held gradients: after an error, the traceback keeps the reducer alive."""
        self._task = None
        self._handles.clear()
        self._accumulated.clear()
        self._order.clear()

    def _reduce(self, number: int, parts: list[torch.Tensor], comm: BufferComm) -> None:
        if self._on_grad is not None:
            self._on_grad(*self._met[number], parts[0])
        for group in self._order.reduce(number, comm.bucket, (parts, comm)):
            self._start(group)

    def _start(self, group: Mapping[int, _Gradient]) -> None:
        """Start the reduction of one gradient, or of several in their bucket."""
        for _, running in self._handles:
            running.wait_comm()  # so that its memory is free before the next one takes more
        handle: AnyReduceHandle
        if len(group) == 1:
            ((parts, comm),) = group.values()
            handle = start_reduce_parts(parts, comm)
        else:
            bucket = next(iter(group.values()))[1].bucket
            assert bucket is not None, "only a bucket reduces several gradients together"
            handle = bucket.start_reduce([(comm.unit or "", parts[0]) for parts, comm in group.values()])
        self._handles.append((list(group), handle))
        while len(self._handles) > _MOST_RUNNING:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        numbers, handle = self._handles.pop(0)
        found = handle.finish()
        for number, grad in zip(numbers, [found] if isinstance(found, torch.Tensor) else found, strict=True):
            # A shard that is gathered twice in one call has two reductions, which add up in the
            # order of backward.
            self.sums[number] = self.sums[number].add_(grad) if number in self.sums else grad


@dataclass(frozen=True, slots=True)
class GradSlot:
    """Where the gradient of one leaf goes: a reducer, and the number of the leaf."""

    reducer: GradReducer
    number: int


_current: contextvars.ContextVar[GradReducer | None] = contextvars.ContextVar("funcshard_reducer", default=None)


@contextlib.contextmanager
def activate(reducer: GradReducer) -> Iterator[GradReducer]:
    """Let units find ``reducer`` in the ``with`` block; the innermost of nested blocks counts."""
    token = _current.set(reducer)
    try:
        yield reducer
    finally:
        reducer.close()
        _current.reset(token)


def current_reducer() -> GradReducer | None:
    """Return the active reducer, if there is one."""
    return _current.get()


def note_collective(mesh: Mesh) -> None:
    """Let the active ``value_and_grad`` know that its loss function communicates over ``mesh``."""
    reducer = _current.get()
    if reducer is not None:
        reducer.note_collective(mesh)


def take_slot(shard: torch.Tensor, comm: BufferComm) -> GradSlot | None:
    """Return the slot of ``shard`` in the active reducer, if it is one of the reducer's leaves."""
    reducer = _current.get()
    return None if reducer is None else reducer.slot(shard, comm)
