"""Gradients of one call of ``value_and_grad``, from backward through reductions to their sums.

``value_and_grad`` makes a ``GradReducer`` and activates it around the user's loss function. A unit
that gathers a shard finds the reducer in a context variable and takes a ``GradSlot``: the reducer,
and the number of the shard among the leaves. In backward the unit hands its unreduced gradient to
the slot's reducer, and autograd goes on while the reduction runs. A reducer lives for one call.

A call may run several forwards and backwards, one for each micro-batch. ``reduce`` says whether the
reductions of all of them add up, or the unreduced gradients, or the sums over the shard axis alone,
which ``PartialSums`` holds.
A unit that is not freed after forward stays gathered between these forwards, in ``KeptUnits``.

Why leaves are found by ``id``: the pytree that is differentiated may hold the shards of several
models, so unit and buffer do not name a leaf; and a shard that ``loss_fn`` computes from a leaf has
the leaf's unit and buffer, and must not be taken for it.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from funcshard._utils import graph_task_id, is_transformed, unwrapped
from funcshard.comm import Mesh
from funcshard.core.buffer_comm import (
    AnyGatherHandle,
    BufferComm,
    ReduceHandle,
    SharedGatherHandle,
    start_reduce_parts,
)
from funcshard.core.kept_units import KeptUnits
from funcshard.core.partial_sums import PartialSums
from funcshard.plan import BufferPlan, Reduce, UnitPlan, buffer_mode, unit_mode

_log = logging.getLogger("funcshard.core")

# Reductions that run at a time. One more waits for the oldest, so that few full gradients exist.
_MOST_RUNNING = 1

# on_grad(unit, buffer, 1-D gradient), which may write to the gradient.
OnGrad = Callable[[str, BufferPlan, torch.Tensor], None]
_Gradient = tuple[list[torch.Tensor], BufferComm]  # 1-D parts, and how they are reduced


class GradReducer:
    """The leaves that one call differentiates with respect to, and their gradients on the way.

    Arguments:
        leaves: the tensors to differentiate with respect to.
        on_grad: called with each unreduced gradient, before its reduction.
        on_scattered: called with each sum over the shard axis, before it is reduced along other
            axes; with the unreduced gradient, if its buffer is not cut over the shard axis.
        reduce: when the gradients of several backwards are reduced.
        gathered: the gathered parts, by number, of shards that are gathered already.
        mesh: see the attribute.

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
        divided: by number of the leaf, the number by which its gradients were divided before they
            were reduced; only leaves of units whose precision asks for it are listed.
        kept: the units that stay gathered until their backward, or until the last micro-batch.
        at_end: functions to call at the end of the backward that runs.
    """

    __slots__ = (
        "_accumulated", "_accumulating", "_awaited", "_gathered", "_handles", "_hook", "_met", "_modes", "_numbers",
        "_on_grad", "_on_scattered", "_partial", "_reduce", "_task", "_zero_weight", "at_end", "divided", "frozen", "kept",
        "leaves", "local", "mesh", "received", "sums", "worlds",
    )  # fmt: skip

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        *,
        on_grad: OnGrad | None = None,
        on_scattered: OnGrad | None = None,
        reduce: Reduce = "each",
        gathered: Mapping[int, Sequence[torch.Tensor]] | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.leaves = leaves
        self.mesh = mesh
        self.received = False
        self.worlds: dict[int, Mesh] = {}
        self.frozen: set[int] = set()
        self.local: dict[int, tuple[Mesh, tuple[str, ...]]] = {}
        self.sums: dict[int, torch.Tensor] = {}
        self.divided: dict[int, int] = {}
        self.kept = KeptUnits()
        self.at_end: list[Callable[[], None]] = []
        self._on_grad = on_grad
        self._on_scattered = on_scattered
        self._reduce = reduce
        self._modes: dict[int, str] = {}  # by number; empty if all gradients are reduced at once
        self._hook = "on_grads" if on_grad is not None else "on_reduce_scattered" if on_scattered is not None else ""
        self._partial: PartialSums | None = None
        if on_scattered is not None or not isinstance(reduce, str) or reduce == "shard_each":
            self._partial = PartialSums(None if on_scattered is None else self._call_on_scattered)
        self._gathered = gathered or {}
        self._numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        self._met: dict[int, tuple[str, BufferPlan]] = {}
        self._task: int | None = None  # autograd's number of this reducer's backward, while that runs
        self._accumulating = False
        self._zero_weight = False
        self._accumulated: dict[int, _Gradient] = {}
        self._awaited: Counter[int] = Counter()  # gradients that the coming backward will compute, by number
        self._handles: list[tuple[int, ReduceHandle]] = []

    @classmethod
    def of_gathered(cls, leaves: Sequence[torch.Tensor], gathered: Sequence[Sequence[torch.Tensor]]) -> GradReducer:
        """Return a reducer for shards that are gathered already.

        A unit that gathers such a shard receives the leaves of its buffer.
        """
        return cls(leaves, gathered=dict(enumerate(gathered)))

    def note_collective(self, mesh: Mesh) -> None:
        """Note that the loss function communicates over ``mesh`` other than by gathering a unit."""
        if self.mesh is None:
            self.worlds[mesh.world_size] = mesh

    def note_gather(self, shard: torch.Tensor, mesh: Mesh, unit: str, buffer: BufferPlan) -> Sequence[torch.Tensor] | None:
        """Note that a unit gathers a shard; return the leaves if these are gathered already.

        Raises:
            ValueError: ``loss_fn`` computed the shard from others, and a feature in use forbids
                that.
        """
        self.worlds[mesh.world_size] = mesh
        number = self._numbers.get(id(shard))
        if number is None:
            mode = unit_mode(self._reduce, unit)
            needs = self._hook or ("" if mode == "each" else f"reduce={mode!r}")
            # Why unwrapped: inside torch.func.jvp a shard does not say that it requires a gradient.
            gets = shard.requires_grad or (self._hook and unwrapped(shard).requires_grad)
            if needs and buffer.trainable and gets and torch.is_grad_enabled():
                what = "was computed from others inside loss_fn: compute it before, or leave this out"
                if is_transformed(shard):
                    what = "is one that a torch.func transform inside loss_fn differentiates or maps over: leave this out"
                elif self._task is not None:
                    what = "is computed with again by remat, under a torch.func transform: leave one of them out"
                raise ValueError(
                    f"{needs} needs shards that are gathered as they are; the shard {buffer.key!r} of unit "
                    f"{unit or '(root)'!r} {what}"
                )
            return None
        self._met[number] = (unit, buffer)
        if not buffer.trainable:
            self.frozen.add(number)
        if buffer.local:
            self.local[number] = (mesh, buffer.local)
        return self._gathered.get(number)

    def find_kept(
        self, comms: Sequence[BufferComm], shard: Mapping[str, torch.Tensor]
    ) -> list[SharedGatherHandle | None] | None:
        """Return ``KeptUnits.find`` of a unit's shard."""
        if not self.kept.by_leaf or not comms or self._numbers.get(id(shard[comms[0].buffer])) not in self.kept.by_leaf:
            return None
        shards = [shard[comm.buffer] for comm in comms]
        return self.kept.find([self._numbers.get(id(local), -1) for local in shards], comms, shards)

    def keep(
        self,
        unit: UnitPlan,
        comms: Sequence[BufferComm],
        shard: Mapping[str, torch.Tensor],
        handles: Sequence[AnyGatherHandle | None],
    ) -> Sequence[AnyGatherHandle | None]:
        """Keep a unit gathered if its shards are leaves; return the handles to use."""
        shards = [shard[comm.buffer] for comm in comms]
        numbers = [self._numbers.get(id(local), -1) for local in shards]
        return handles if -1 in numbers else self.kept.keep(unit, numbers, comms, shards, handles)

    def number_of(self, shard: torch.Tensor) -> int | None:
        """Return the number of ``shard`` among the leaves; ``None`` if it is none of them."""
        return self._numbers.get(id(shard))

    def expect(self, number: int) -> None:
        """Expect a gradient of leaf ``number``, unless backward computes forward again."""
        if self._task is None:
            self._awaited[number] += 1

    @property
    def has_gathered(self) -> bool:
        """Whether the leaves are gathered already, so that units gather nothing."""
        return bool(self._gathered)

    @property
    def in_backward(self) -> bool:
        """Whether the reducer's own backward runs, not one inside it, such as a checkpoint's."""
        return self._task is not None and self._task == graph_task_id()

    def takes_gradients(self) -> bool:
        """Return whether the gradients that backward computes now are for this reducer.

        Raises:
            ValueError: a backward inside the reducer's own computes them, and a hook is to see
                them.
        """
        if self.in_backward:
            return True
        if self._hook and self._task is not None:
            raise ValueError(
                f"{self._hook} sees the gradients that the backward of value_and_grad computes; found a backward inside it "
                f"that reduces gradients of shards, as in torchdiffeq.odeint_adjoint or an autograd Function that calls "
                f"torch.autograd.grad: leave {self._hook} out, and change the gradients that value_and_grad returns"
            )
        return False

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
        self._awaited[number] -= 1
        more = self._awaited[number] > 0
        if not more and self.kept.by_leaf:
            self.kept.drop(number, accumulating=self._accumulating)
        once = self._reduce != "each" and self._mode(number, comm) == "once"
        if self._zero_weight or once or self._hook:
            whole = torch.cat(parts)  # a copy, which is held or written to
            parts = [whole if comm.dtypes.reduced is None else whole.to(comm.dtypes.reduced)]
        if self._zero_weight:
            parts[0].nan_to_num_(0.0, 0.0, 0.0)
        accumulated = self._accumulated.pop(number, None)
        if accumulated is not None:
            parts = [accumulated[0][0].add_(parts[0])]
        if once and (self._accumulating or more):
            self._accumulated[number] = (parts, comm)
        else:
            self._reduce_whole(number, parts, comm)

    def post_backward(self) -> None:
        """End this backward: wait for every reduction."""
        self._task = None
        self._awaited.clear()
        while self.at_end:
            self.at_end.pop()()
        if not self._accumulating:
            while self._accumulated:
                number = next(iter(self._accumulated))
                self._reduce_whole(number, *self._accumulated.pop(number))
        while self._handles:
            self._finish_oldest()
        self.kept.end_backward(accumulating=self._accumulating)
        if self._partial is not None and not self._accumulating:
            for number, grad in self._partial.rest():
                self._add_up(number, grad)
        _log.debug("root post_backward")

    def close(self) -> None:
        """Drop what is held, because after an error the traceback keeps the reducer alive."""
        self._task = None
        self.at_end.clear()
        self._handles.clear()
        self._accumulated.clear()
        self.kept.clear()
        if self._partial is not None:
            self._partial.clear()

    def _mode(self, number: int, comm: BufferComm) -> str:
        """Return when the gradient of a leaf is reduced."""
        mode = self._modes.get(number)
        if mode is None:
            topology, chosen = comm.topology, unit_mode(self._reduce, comm.unit or "")
            mode = self._modes[number] = buffer_mode(chosen, cut=topology.cut, repeated=bool(topology.repeated))
        return mode

    def _call_on_scattered(self, number: int, partial: torch.Tensor) -> None:
        assert self._on_scattered is not None
        self._on_scattered(*self._met[number], partial)

    def _reduce_whole(self, number: int, parts: list[torch.Tensor], comm: BufferComm) -> None:
        if self._on_grad is not None:
            self._on_grad(*self._met[number], parts[0])
        if comm.dtypes.divided:
            parts = self._divided_before(number, parts, comm)
        if self._on_scattered is not None and not comm.topology.cut:
            self._call_on_scattered(number, parts[0])
        for _, running in self._handles:
            running.wait_comm()  # so that its memory is free before the next one takes more
        self._handles.append((number, start_reduce_parts(parts, comm)))
        while len(self._handles) > _MOST_RUNNING:
            self._finish_oldest()

    def _divided_before(self, number: int, parts: list[torch.Tensor], comm: BufferComm) -> list[torch.Tensor]:
        """Return a leaf's gradient, divided as ``MixedPrecision.divide_before_reduce`` says."""
        topology = comm.topology
        ranks = math.prod(group.size for _, group in topology.repeated) * (topology.mesh.shard.size if topology.cut else 1)
        divisor = 1
        while divisor * divisor < ranks:
            divisor *= 2
        if divisor == 1:
            return parts
        self.divided[number] = divisor
        return [(parts[0] if len(parts) == 1 else torch.cat(parts)).div_(divisor)]

    def _finish_oldest(self) -> None:
        number, handle = self._handles.pop(0)
        if self._partial is not None:
            waits = self._accumulating and self._modes.get(number) == "shard_each"
            if not self._partial.take(number, handle, hold=waits):
                return
        self._add_up(number, handle.finish())

    def _add_up(self, number: int, grad: torch.Tensor) -> None:
        # A shard that is gathered twice in one call has two reductions, which add up in the order
        # of backward.
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


def take_slot(shard: torch.Tensor) -> GradSlot | None:
    """Return the slot of ``shard`` in the active reducer, if it is one of the reducer's leaves."""
    reducer = _current.get()
    number = None if reducer is None else reducer.number_of(shard)
    return None if reducer is None or number is None else GradSlot(reducer, number)


def expect_gradient(shard: torch.Tensor, leaf: torch.Tensor) -> None:
    """Let the active reducer expect a gradient of ``shard``, if autograd records the gather.

    Arguments:
        shard: this rank's shard.
        leaf: a leaf that was gathered from it.
    """
    reducer = _current.get()
    number = None if reducer is None else reducer.number_of(shard)
    # Why look at the leaf: a Function that runs under no_grad is not told so.
    if reducer is not None and number is not None and unwrapped(leaf).requires_grad:
        reducer.expect(number)
