"""Forward-mode differentiation in threads that take turns.

torch keeps one forward-mode level for a whole process, and two Python variables that say who is inside it. Ranks that are
threads need one each: the variables change hands with the turn, and the level is open as long as any rank is inside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch._functorch import eager_transforms
from torch.autograd import forward_ad

__all__ = ["DualState", "one_level_for_all"]


@dataclass(frozen=True, slots=True)
class DualState:
    """How far inside forward-mode differentiation whoever has the turn is.

    Attributes:
        level: the level that ``torch.autograd.forward_ad`` takes by default, -1 outside.
        nesting: how many ``torch.func.jvp`` are around.
    """

    level: int
    nesting: int

    @classmethod
    def take(cls) -> DualState:
        return cls(forward_ad._current_level, eager_transforms.JVP_NESTING)

    def put(self) -> None:
        forward_ad._current_level, eager_transforms.JVP_NESTING = self.level, self.nesting


@contextlib.contextmanager
def one_level_for_all() -> Iterator[None]:
    """Let everybody who enters torch's forward-mode level inside the ``with`` block share it; the last one out closes it.

    What each thread sees is as if the level were its own, provided that its ``DualState`` is put with its turn. Tangents
    that one thread leaves behind in its tensors are gone when the last one has left, not before.
    """
    enter, leave = forward_ad.enter_dual_level, forward_ad.exit_dual_level
    inside = 0

    def enter_shared() -> int:
        nonlocal inside
        if inside == 0 or forward_ad._current_level >= 0:  # torch itself refuses a second level around the same code
            level = enter()
        else:
            level = forward_ad._current_level = 0
        inside += 1
        return level

    def leave_shared(*, level: int | None = None) -> None:
        nonlocal inside
        current = forward_ad._current_level
        if inside <= 1 or current < 0 or level not in (None, current):
            leave(level=level)
        else:
            forward_ad._current_level = -1
        inside -= 1

    forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter_shared, leave_shared
    try:
        yield
    finally:
        forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter, leave
