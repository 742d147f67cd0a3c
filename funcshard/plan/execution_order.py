"""The order of a call: which units are gathered, and when.

Two small state machines without tensors. The prefetcher of ``core`` drives them with the calls of a
real program, ``predict_events`` with those of the schedule. So a run and its prediction share each
rule, and a program may leave the schedule.

- ``ForwardOrder``: the gathers of forward.
- ``BackwardOrder``: the gathers of backward, of units that were resharded after forward.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence

from funcshard.plan.schedule import Schedule


class ForwardOrder:
    """Decide which units forward gathers, and when.

    Arguments:
        schedule: the expected order of calls, and how far to gather ahead.
        known: whether the order of the schedule is more than a guess.

    Attributes:
        ran: the units that forward has called so far.
    """

    def __init__(self, schedule: Schedule, *, known: bool = True) -> None:
        self.ran: list[str] = []
        self._schedule = schedule
        self._follows = known  # whether forward has followed the schedule so far
        self._gathered: set[str] = set()  # not called since their gather, or kept for the next call
        # A unit that comes again later can stay gathered until then.
        self._last = {name: order_position for order_position, name in enumerate(schedule.order)}

    def gather(self, name: str) -> bool:
        """Return whether to gather a unit now that forward calls it."""
        if name in self._gathered:
            return False
        self._gathered.add(name)
        return True

    def call(self, name: str, *, stays: bool) -> bool:
        """Note that forward calls a unit; return whether it stays gathered for its next call.

        Arguments:
            name: the unit.
            stays: whether the unit stays gathered after forward.
        """
        schedule_order, order_position = self._schedule.order, len(self.ran)
        # Once forward has left the schedule, it gathers on demand for the rest of the call.
        self._follows = (
            self._follows
            and order_position < len(schedule_order)
            and schedule_order[order_position] == name
        )
        # Why ran: without a known order, a unit that forward calls a second time may be called a
        # third time.
        keeps = stays and (self._last[name] > order_position if self._follows else name in self.ran)
        if not keeps:
            self._gathered.discard(name)
        self.ran.append(name)
        return keeps

    def prefetch(self) -> list[str]:
        """Return the units to gather ahead now."""
        schedule, order_position = self._schedule, len(self.ran)
        if not self._follows or not schedule.forward_prefetch:
            return []
        if schedule.limit == 1 and (
            order_position == len(schedule.order)
            or schedule.order[order_position] in self._gathered
        ):
            return []  # only for speed
        return [
            name
            for name in schedule.order[order_position : order_position + schedule.limit]
            if name not in schedule.on_demand and self.gather(name)
        ]


class BackwardOrder:
    """Decide which units backward gathers again, and when.

    A *use* is one call of a unit whose gathered leaves backward needs. Uses are numbered, and each
    has a moment: an integer that grows as backward proceeds.

    Arguments:
        schedule: how far to gather ahead.
        units: the name of the unit of each use, by number.
        reaches: whether the backward that runs may reach a use, by number.
    """

    def __init__(
        self,
        schedule: Schedule,
        units: Mapping[int, str] | Sequence[str],
        reaches: Callable[[int], bool] = lambda number: True,
    ) -> None:
        self._schedule = schedule
        self._units = units
        # Note: every rank has to give the same answer, or gathers would differ; so it must not
        # depend on what is in a rank's memory.
        self._reaches = reaches
        self._uses: Sequence[tuple[int, int]] = ()
        self._started: set[int] = set()
        self._gathered: set[int] = set()

    def expect(self, uses: Sequence[tuple[int, int]]) -> None:
        """Set the uses that backward will reach: ``(moment, number)``, by moment."""
        self._uses = uses

    def gather(self, number: int) -> bool:
        """Return whether to gather a use now that backward needs it."""
        if number in self._started:
            return False
        self._started.add(number)
        return True

    def reach(self, number: int) -> None:
        """Note that backward computes with a use's gathered buffers; inverse of ``release``."""
        self._started.discard(number)
        self._gathered.add(number)

    def release(self, number: int) -> None:
        """Note that the gathered buffers of a use are free again."""
        self._gathered.discard(number)

    def prefetch(self, moment: int, *, most: int | None = None) -> list[int]:
        """Return the uses after ``moment`` to gather ahead now, at most ``most`` or the limit."""
        ahead_uses = []
        uses_left = self._schedule.limit if most is None else most
        for order_position in range(
            bisect.bisect_left(self._uses, (moment + 1, 0)), len(self._uses)
        ):
            use_index = self._uses[order_position][1]
            # What is in memory, or is never reached, takes no part of the limit.
            if use_index in self._gathered or not self._reaches(use_index):
                continue
            if self._units[use_index] not in self._schedule.on_demand and self.gather(use_index):
                ahead_uses.append(use_index)
            # A use on demand counts too: the limit is a distance, not a number of gathers.
            uses_left -= 1
            if not uses_left:
                break
        return ahead_uses
