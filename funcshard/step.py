"""One call of ``value_and_grad`` under way: what it differentiates with respect to, and what backward hands it.

``value_and_grad`` opens a step around the user's loss function. Units that are gathered inside it find the step, tell it
the size of their world and which shards are frozen, and in backward hand it their reductions while these are still under
way, so that communication overlaps the rest of backward. A step lives for one call, in a context variable; nothing of it
outlasts the call.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

__all__ = ["Slot", "Step", "current", "open_step", "slot_of"]

# Reductions under way at a time: one more waits for the oldest, so that few full gradients exist at any moment.
_IN_FLIGHT = 1


class _Pending(Protocol):
    def finish(self) -> torch.Tensor:
        """Wait, and return this rank's slice of the sum."""


@dataclass(slots=True, eq=False)
class Step:
    """What one call of ``value_and_grad`` has met so far.

    Attributes:
        leaves: the tensors that it differentiates with respect to.
        reducing: whether its own backward runs now.
        worlds: sizes of the data-parallel worlds of the units met.
        frozen: numbers of the leaves that a plan calls frozen.
        local: numbers of the leaves that a plan keeps local to this rank.
        sums: gradients that have been reduced, by number of the leaf.
    """

    leaves: Sequence[torch.Tensor]
    reducing: bool = False
    worlds: set[int] = field(default_factory=set)
    frozen: set[int] = field(default_factory=set)
    local: set[int] = field(default_factory=set)
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    _pending: list[tuple[int, _Pending]] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers = {id(leaf): number for number, leaf in enumerate(self.leaves)}

    def meet(self, shard: torch.Tensor, world_size: int, *, trainable: bool, shared: bool) -> None:
        """Take note of a shard that is about to be gathered."""
        self.worlds.add(world_size)
        number = self._numbers.get(id(shard))
        if number is not None and not trainable:
            self.frozen.add(number)
        if number is not None and not shared:
            self.local.add(number)

    def number(self, shard: torch.Tensor) -> int | None:
        """Number of ``shard`` among the leaves; ``None`` for a tensor computed from them, or another altogether."""
        return self._numbers.get(id(shard))

    def add(self, number: int, pending: _Pending) -> None:
        """Take a reduction that has been started for leaf ``number``."""
        self._pending.append((number, pending))
        while len(self._pending) > _IN_FLIGHT:
            self._finish_oldest()

    def finish(self) -> None:
        """Wait for every reduction."""
        while self._pending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        number, pending = self._pending.pop(0)
        grad = pending.finish()
        # a shard that was gathered twice in one step has two reductions; they add up in the order of backward
        self.sums[number] = self.sums[number] + grad if number in self.sums else grad


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
        opened.reducing = False
        _step.reset(token)


def current() -> Step | None:
    """The innermost step under way, if any."""
    return _step.get()


def slot_of(shard: torch.Tensor) -> Slot | None:
    """The place for the gradient of ``shard`` in the current step, if it is one of the step's leaves."""
    opened = _step.get()
    number = opened.number(shard) if opened is not None else None
    return None if opened is None or number is None else Slot(opened, number)
