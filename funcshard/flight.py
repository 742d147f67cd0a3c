"""One call of a fully sharded function: what it gathers ahead, in forward and in the backward that may follow.

A flight belongs to one call. Forward keeps it until the call returns; after that only the autograd graph of the call
does, and takes it along when it goes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from funcshard.collectives import Gathering
from funcshard.schedule import Schedule

__all__ = ["Flight"]


class _Saved(Protocol):
    @property
    def needed(self) -> bool: ...
    @property
    def waiting(self) -> bool: ...
    @property
    def gathered(self) -> bool: ...
    def start(self) -> None: ...


class Flight:
    """The units of one call, in the order in which they ran.

    Attributes:
        ran: names of the units that forward has entered so far.
    """

    def __init__(self, schedule: Schedule, start: Callable[[str], list[Gathering | None]], *, prefetch: bool) -> None:
        self.ran: list[str] = []
        self._schedule = schedule
        self._start = start
        self._ahead: dict[str, list[Gathering | None]] = {}
        self._prefetch = prefetch and schedule.forward_prefetch
        self._landed = False
        self._saved: list[weakref.ref[_Saved]] = []

    def enter(self, name: str) -> list[Gathering | None]:
        """Start to gather a unit that forward enters, unless that is under way, and those that come next."""
        started = self._ahead.pop(name, None) or self._start(name)
        if self._landed:  # recomputation in backward
            return started
        position = len(self.ran)
        self.ran.append(name)
        order = self._schedule.order
        self._prefetch = self._prefetch and order[position : position + 1] == (name,)
        if self._prefetch:
            for following in order[position + 1 : position + 1 + self._schedule.limit]:
                if following not in self._ahead:
                    self._ahead[following] = self._start(following)
        return started

    def land(self) -> None:
        """End forward: what was gathered ahead for a unit that was never entered is waited for and dropped."""
        self._landed = True
        for started in self._ahead.values():
            for under_way in started:
                if under_way is not None:
                    under_way.work.wait()
        self._ahead.clear()

    def register(self, saved: _Saved) -> int | None:
        """Take note of what a unit saved in forward; return its place in the order of forward."""
        if self._landed:
            return None
        self._saved.append(weakref.ref(saved))
        return len(self._saved) - 1

    def reached(self, place: int) -> None:
        """Backward has come to a unit, and has not computed its gradients."""
        if self._schedule.backward_prefetch == "pre":
            self._gather_before(place)

    def passed(self, place: int) -> None:
        """Backward has computed a unit's gradients."""
        if self._schedule.backward_prefetch == "post":
            self._gather_before(place)

    def _gather_before(self, place: int) -> None:
        ahead = 0
        for ref in reversed(self._saved[:place]):
            saved = ref()
            if saved is None or not saved.needed or saved.gathered:  # backward needs nothing of this unit, or has it
                continue
            if not saved.waiting:
                saved.start()
            ahead += 1
            if ahead == self._schedule.limit:
                return
