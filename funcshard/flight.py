"""One call of a fully sharded function: what it gathers ahead, in forward and in the backward that may follow.

A flight belongs to one call. Forward keeps it until the call returns; after that only the autograd graph of the call
does, and takes it along when it goes.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from funcshard.schedule import Schedule
from funcshard.transfer import CommonGathering, UnderWay

# what is gathered of the buffers of one unit
Started = Sequence[UnderWay | None]

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

    Arguments:
        schedule: when units are gathered ahead.
        start: starts to gather units, in one collective where they are several.
        known: whether the schedule's order is that of the call, as far as anybody knows.
        runs: names of units that are gathered in one collective, by the name of each.

    Attributes:
        ran: names of the units that forward has entered so far.
    """

    def __init__(
        self,
        schedule: Schedule,
        start: Callable[[Sequence[str]], Sequence[Started]],
        *,
        known: bool,
        runs: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.ran: list[str] = []
        self._schedule = schedule
        self._start = start
        self._runs = runs or {}
        self._ahead: dict[str, Started] = {}  # not entered yet, or to stay for the next time
        self._begun: set[str] = set()
        self._as_known = known
        self._landed = False
        self._saved: list[weakref.ref[_Saved]] = []
        self._now = 0  # counts what forward does: units that it enters, and uses of their leaves that backward needs
        self._entered: list[int] = []
        self._names: list[str] = []
        self._began: list[int] = []
        self._used: list[int] = []
        self._uses: list[tuple[int, int]] = []

    def enter(self, name: str, *, stays: bool = False) -> Started | None:
        """Start to gather a unit that forward enters, unless that is under way, and those that come next.

        Arguments:
            name: the unit.
            stays: whether it stays gathered after forward, and so until forward enters it the next time.

        Returns:
            What was started; ``None`` after the call, when backward computes a unit again, which gathers for itself.
        """
        if self._landed:
            return None
        if name not in self._ahead:
            self._begin(name)
        started = self._ahead.pop(name)
        for under_way in started:  # first, so that a rank that is ahead takes no more memory before the others have come
            if under_way is not None:
                under_way.settle()
        position, order = len(self.ran), self._schedule.order
        self._as_known = self._as_known and order[position : position + 1] == (name,)
        # where nobody knows what comes, what comes the second time may come a third
        if stays and name in (order[position + 1 :] if self._as_known else self.ran):
            self._ahead[name] = started = [each and _common(each) for each in started]
        self.ran.append(name)
        self._entered.append(self._tick())
        if self._as_known and self._schedule.forward_prefetch:
            for following in order[position + 1 : position + 1 + self._schedule.limit]:
                if following not in self._ahead and following not in self._schedule.on_demand:
                    self._begin(following)
        return started

    def _begin(self, name: str) -> None:
        """Start to gather a unit in forward, and with it those of its run that forward has not begun."""
        names = [other for other in self._runs.get(name, (name,)) if other == name or other not in self._begun]
        self._ahead.update(zip(names, self._start(names), strict=True))
        self._begun.update(names)

    def land(self) -> None:
        """End forward: what was gathered ahead for a unit that was never entered is waited for and dropped."""
        self._landed = True
        for started in self._ahead.values():
            for under_way in started:
                if under_way is not None:
                    under_way.work.wait()
        self._ahead.clear()
        self._uses = sorted((used, place) for place, used in enumerate(self._used) if used)

    def register(self, saved: _Saved) -> int | None:
        """Take note of what a unit saved in forward; return its place in the order of forward."""
        if self._landed:
            return None
        self._saved.append(weakref.ref(saved))
        self._names.append(self.ran[-1] if self.ran else "")
        self._began.append(self._tick())
        self._used.append(0)
        return len(self._saved) - 1

    def used(self, place: int) -> None:
        """Forward has used a leaf of a unit in a way that backward needs: it will come to the last such use first."""
        if not self._landed:
            self._used[place] = self._tick()

    def backward(self) -> tuple[tuple[str, str], ...] | None:
        """What backward comes to, in order, as ``Schedule.backward`` says it; ``None`` if the order of units says it all."""
        moments = [(used, "gather", self._names[place]) for used, place in self._uses]
        moments += [(entered, "reduce", name) for entered, name in zip(self._entered, self.ran, strict=True)]
        found = tuple((what, name) for _, what, name in sorted(moments, reverse=True))
        saved = set(self._names)
        flat = [
            (what, name) for name in self.ran[::-1] for what in ("gather", "reduce") if what == "reduce" or name in saved
        ]
        return None if found == tuple(flat) else found

    def begin(self) -> None:
        """Backward has come to what the call returned: gather the unit that it comes to first, before all else."""
        if self._schedule.backward_prefetch == "pre" and self._uses:
            self._gather_before(self._now + 1, most=1)

    def reached(self, place: int) -> None:
        """Backward has come to a unit, and has not computed its gradients."""
        if self._schedule.backward_prefetch == "pre":
            self._gather_before(self._used[place])

    def passed(self, place: int) -> None:
        """Backward has computed a unit's gradients."""
        if self._schedule.backward_prefetch == "post":
            self._gather_before(self._began[place])

    def together(self, place: int) -> list[_Saved]:
        """What backward gathers in one collective when it gathers a unit: of its run, those that it comes to later."""
        names = self._runs.get(self._names[place], ())
        found = {self._names[place]: self._saved[place]()}
        earlier = self._uses[: bisect.bisect_left(self._uses, (self._used[place], 0))] if names else []
        for _, other in reversed(earlier):
            name = self._names[other]
            if name in names and name not in found:
                saved = self._saved[other]()
                found[name] = None if saved is None or saved.gathered or saved.waiting else saved
                if len(found) == len(names):
                    break
        return [saved for name in names or found if (saved := found.get(name)) is not None]

    @property
    def saved(self) -> bool:
        """Whether a backward may gather again what units of this call let go of."""
        return bool(self._saved)

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def _gather_before(self, moment: int, most: int | None = None) -> None:
        """Gather the units whose last use in forward came before a moment of it, the latest first; ``most`` so many."""
        most = self._schedule.limit if most is None else most
        ahead = 0
        for _, place in reversed(self._uses[: bisect.bisect_left(self._uses, (moment, 0))]):
            saved = self._saved[place]()
            if saved is None or not saved.needed or saved.gathered:  # backward needs nothing of this unit, or has it
                continue
            if not saved.waiting and self._names[place] not in self._schedule.on_demand:
                saved.start()
            ahead += 1
            if ahead == most:
                return


def _common(started: UnderWay) -> CommonGathering:
    return started if isinstance(started, CommonGathering) else CommonGathering(started)
