"""One call of ``value_and_grad`` under way: what it differentiates with respect to, and what backward hands it.

``value_and_grad`` opens a step around the user's loss function. Units that are gathered inside it find the step, tell it
the size of their world and which shards are frozen, and in backward hand it their reductions while these are still under
way, so that communication overlaps the rest of backward. A step may run several forwards and backwards, one for each
micro-batch: their reductions add up, or, where the step keeps, their unreduced gradients do and are reduced once. Where
units share a reduction, the step holds their gradients until the last one has come. A step lives for one call, in a context
variable; nothing of it outlasts the call.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from funcshard._utils import graph_task_id
from funcshard.comm import Mesh
from funcshard.plan import BufferPlan

__all__ = ["Joint", "Slot", "Step", "current_step", "open_step", "slot_of"]

_Sums = TypeVar("_Sums", covariant=True)


# Reductions under way at a time: one more waits for the oldest, so that few full gradients exist at any moment.
_IN_FLIGHT = 1


class _Pending(Protocol[_Sums]):
    def settle(self) -> None:
        """Wait until what it read is not needed any more."""

    def finish(self) -> _Sums:
        """Wait, and return this rank's slice of the sum; of several, in the order of what was given."""


# starts the reduction of what 1-D tensors are side by side; it may write to one that is alone
_Start = Callable[[list[torch.Tensor]], _Pending[torch.Tensor]]


class Joint(Protocol):
    """One buffer of several units, whose reductions may share a collective."""

    def start_reduce(self, fulls: Sequence[tuple[str, torch.Tensor]]) -> _Pending[Sequence[torch.Tensor]]:
        """Start to reduce the unreduced gradients of some of the units, named."""


_AnyPending = _Pending[torch.Tensor] | _Pending[Sequence[torch.Tensor]]


# an unreduced gradient in 1-D parts, what starts its reduction, what that may be shared in, and as which unit
_Full = tuple[list[torch.Tensor], _Start, Joint | None, str]


@dataclass(slots=True, eq=False)
class Step:
    """What one call of ``value_and_grad`` has met so far.

    Attributes:
        leaves: the tensors that it differentiates with respect to.
        before: called with the number of a leaf and the unreduced gradient of its gathered buffer, before each
            reduction; it may change the gradient in place.
        as_they_are: why shards have to be gathered as they are, ``""`` where they may be transformed first.
        task: the number that autograd gave the step's own backward, while that runs.
        once: whether unreduced gradients add up until the last one of the call, and are reduced once.
        keeping: whether they are kept beyond this backward, because another micro-batch follows.
        void: whether what runs now counts nothing, so that infinities and NaN in its gradients are nothing too.
        worlds: the data-parallel worlds of the units met, by size.
        met: unit and buffer of the leaves met, by number of the leaf.
        frozen: numbers of the leaves that a plan calls frozen.
        local: mesh, and axes along which values differ, of the leaves that a plan keeps local, by number of the leaf.
        sums: gradients that have been reduced, by number of the leaf.
        given: what leaves were gathered to before, by number of the leaf: gathering such a leaf gives this.
    """

    leaves: Sequence[torch.Tensor]
    before: Callable[[int, torch.Tensor], None] | None = None
    as_they_are: str = ""
    task: int | None = None
    once: bool = False
    keeping: bool = False
    void: bool = False
    worlds: dict[int, Mesh] = field(default_factory=dict)
    met: dict[int, tuple[str, BufferPlan]] = field(default_factory=dict)
    frozen: set[int] = field(default_factory=set)
    local: dict[int, tuple[Mesh, tuple[str, ...]]] = field(default_factory=dict)
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    given: dict[int, torch.Tensor] = field(default_factory=dict)
    _kept: dict[int, _Full] = field(default_factory=dict)
    _awaited: dict[int, int] = field(default_factory=dict)
    _held: dict[Joint, dict[int, _Full]] = field(default_factory=dict)
    _missing: dict[Joint, set[int]] = field(default_factory=dict)
    _pending: list[tuple[list[int], _AnyPending]] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers = {id(leaf): number for number, leaf in enumerate(self.leaves)}

    def meet(self, shard: torch.Tensor, mesh: Mesh, unit: str, buffer: BufferPlan) -> None:
        """Take note of a shard that is about to be gathered."""
        self.worlds[mesh.world_size] = mesh
        number = self._numbers.get(id(shard))
        if number is None:
            if self.as_they_are and buffer.trainable and shard.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{self.as_they_are} needs shards that are gathered as they are; the shard {buffer.key!r} of unit "
                    f"{unit or '(root)'!r} was computed from others inside loss_fn: compute it before, or leave this out"
                )
            return
        self.met[number] = (unit, buffer)
        if not buffer.trainable:
            self.frozen.add(number)
        if buffer.local:
            self.local[number] = (mesh, buffer.local)

    def number(self, shard: torch.Tensor) -> int | None:
        """Number of ``shard`` among the leaves; ``None`` for a tensor computed from them, or another altogether."""
        return self._numbers.get(id(shard))

    def gathered(self, shard: torch.Tensor) -> torch.Tensor | None:
        """What ``shard`` was gathered to before the step, if it was."""
        return self.given.get(self._numbers.get(id(shard), -1)) if self.given else None

    def begin(self) -> None:
        """Take the backward that runs now as the step's own."""
        self.task = graph_task_id()

    @property
    def reducing(self) -> bool:
        """Whether the step's own backward runs now, and not one inside it, such as of what a checkpoint computes again."""
        return self.task is not None and self.task == graph_task_id()

    def await_gradient(self, number: int, joint: Joint | None = None) -> None:
        """Expect one more gradient of the leaf in the coming backward."""
        if self.task is None:
            self._awaited[number] = self._awaited.get(number, 0) + 1
            if joint is not None:
                self._missing.setdefault(joint, set()).add(number)

    def add(
        self,
        number: int,
        parts: list[torch.Tensor],
        start: _Start,
        joint: Joint | None = None,
        unit: str = "",
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take the unreduced gradient of leaf ``number``, in parts side by side, and ``start``, which starts its reduction.

        With ``joint`` it is held until those that share its reduction have come, as far as they are awaited; ``unit`` is
        the name there. ``dtype`` is what the gradient is reduced in, ``None`` for its own.
        """
        if self.void or self.once or self.before is not None or joint is not None:
            whole = torch.cat(parts)  # a copy, to be held or written to
            parts = [whole if dtype is None else whole.to(dtype)]
        if self.void:
            parts[0].nan_to_num_(0.0, 0.0, 0.0)
        self._awaited[number] = self._awaited.get(number, 0) - 1
        kept = self._kept.pop(number, None)
        if kept is not None:
            parts = [kept[0][0].add_(parts[0])]
        if self.once and (self.keeping or self._awaited[number] > 0):
            self._kept[number] = (parts, start, joint, unit)
        else:
            self._reduce(number, (parts, start, joint, unit))

    def finish(self) -> None:
        """End this backward: wait for every reduction."""
        self.task = None
        self._awaited.clear()
        self._missing.clear()
        if not self.keeping:
            for number, (_, _, joint, _) in self._kept.items():
                if joint is not None:
                    self._missing.setdefault(joint, set()).add(number)
            while self._kept:
                number = next(iter(self._kept))
                self._reduce(number, self._kept.pop(number))
        for joint in list(self._held):  # of those that were awaited some have not come: their loss did not depend on them
            self._reduce_held(joint)
        while self._pending:
            self._finish_oldest()

    def _reduce(self, number: int, gradient: _Full) -> None:
        parts, start, joint, _ = gradient
        if self.before is not None:
            self.before(number, parts[0])
        if joint is None:
            self._begin_reduction([number], lambda: start(parts))
            return
        if number in self._held.get(joint, ()):
            self._reduce_held(joint)  # a second gradient of one leaf is reduced by itself, as without joint
        self._held.setdefault(joint, {})[number] = gradient
        missing = self._missing.setdefault(joint, set())
        missing.discard(number)
        if not missing:
            self._reduce_held(joint)

    def _reduce_held(self, joint: Joint) -> None:
        held = self._held.pop(joint)
        self._missing.setdefault(joint, set()).update(number for number in held if self._awaited.get(number, 0) > 0)
        if len(held) == 1:
            ((number, (parts, start, _, _)),) = held.items()
            self._begin_reduction([number], lambda: start(parts))
        else:
            fulls = [(unit, parts[0]) for parts, _, _, unit in held.values()]
            self._begin_reduction(list(held), lambda: joint.start_reduce(fulls))

    def _begin_reduction(self, numbers: list[int], start: Callable[[], _AnyPending]) -> None:
        for _, pending in self._pending:
            pending.settle()  # so that its memory is free before more is taken
        self._pending.append((numbers, start()))
        while len(self._pending) > _IN_FLIGHT:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        numbers, pending = self._pending.pop(0)
        found = pending.finish()
        for number, grad in zip(numbers, [found] if isinstance(found, torch.Tensor) else found, strict=True):
            # a shard that was gathered twice in one step has two reductions; they add up in the order of backward
            self.sums[number] = self.sums[number].add_(grad) if number in self.sums else grad


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one leaf's gradient in a step."""

    step: Step
    number: int


_step: contextvars.ContextVar[Step | None] = contextvars.ContextVar("funcshard_step", default=None)


@contextlib.contextmanager
def open_step(leaves: Sequence[torch.Tensor]) -> Iterator[Step]:
    """Open a step that differentiates with respect to ``leaves``; the innermost one counts."""
    opened = Step(leaves)
    token = _step.set(opened)
    try:
        yield opened
    finally:
        opened.task = None
        opened._pending.clear()  # after an error, whose traceback keeps the step, full gradients must not stay
        opened._kept.clear()
        opened._held.clear()
        _step.reset(token)


def current_step() -> Step | None:
    """The innermost step under way, if any."""
    return _step.get()


def slot_of(shard: torch.Tensor, joint: Joint | None = None) -> Slot | None:
    """The place for the gradient of ``shard`` in the current step, if it is one of the step's leaves."""
    opened = _step.get()
    number = opened.number(shard) if opened is not None else None
    if opened is None or number is None:
        return None
    opened.await_gradient(number, joint)
    return Slot(opened, number)
