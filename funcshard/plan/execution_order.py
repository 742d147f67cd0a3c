"""The order of a call: which units are gathered and reduced, when, and which of them together.

Three small state machines without tensors. The prefetcher and the gradient reducer of ``core``
drive them with the calls of a real program; ``predict_events`` drives them with the calls that the
schedule lists. So a prediction and a run cannot disagree about a rule. A program that leaves the
schedule needs no second set of rules: the machines answer any order of calls.

- ``ForwardOrder``: the gathers of forward.
- ``BackwardOrder``: the gathers of backward, of units that were resharded after forward.
- ``ReduceOrder``: the reductions of backward.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from funcshard.plan.schedule import Schedule

__all__ = ["BackwardOrder", "Buckets", "ForwardOrder", "ReduceOrder"]

# By unit: the units of its bucket, which share its collectives; none for a unit without a bucket.
Buckets = Mapping[str, tuple[str, ...]]


class ForwardOrder:
    """Decide which units forward gathers, and when.

    Arguments:
        schedule: the order in which forward is expected to call units, and how far to gather ahead.
        buckets: which units share an all-gather.
        known: whether the order of the schedule is more than a guess.

    Attributes:
        ran: names of the units that forward has called so far.
    """

    def __init__(self, schedule: Schedule, buckets: Buckets, *, known: bool = True) -> None:
        self.ran: list[str] = []
        self._schedule = schedule
        self._buckets = buckets
        self._follows = known  # whether forward has followed the schedule so far
        self._gathered: set[str] = set()  # not called since their gather, or kept for the next call
        self._begun: set[str] = set()
        self._last = {name: position for position, name in enumerate(schedule.order)}

    def gather(self, name: str) -> tuple[str, ...]:
        """Return the units to gather as forward calls ``name``; none if its gather has started."""
        return () if name in self._gathered else self._begin(name)

    def call(self, name: str, *, stays: bool) -> bool:
        """Note that forward calls a unit.

        Arguments:
            name: the unit.
            stays: whether the unit stays gathered after forward.

        Returns:
            Whether its gathered buffers are kept for the next call of this unit.
        """
        order, position = self._schedule.order, len(self.ran)
        self._follows = self._follows and position < len(order) and order[position] == name
        # Why ran: without a known order, a unit that forward calls a second time may be called a
        # third time.
        keeps = stays and (self._last[name] > position if self._follows else name in self.ran)
        if not keeps:
            self._gathered.discard(name)
        self.ran.append(name)
        return keeps

    def prefetch(self) -> list[tuple[str, ...]]:
        """Return the units to gather ahead now, those that share an all-gather together."""
        schedule, position = self._schedule, len(self.ran)
        if not self._follows or not schedule.forward_prefetch:
            return []
        if schedule.limit == 1 and (position == len(schedule.order) or schedule.order[position] in self._gathered):
            return []  # only for speed
        return [
            self._begin(name)
            for name in schedule.order[position : position + schedule.limit]
            if name not in self._gathered and name not in schedule.on_demand
        ]

    def _begin(self, name: str) -> tuple[str, ...]:
        bucket = self._buckets.get(name)
        # Why begun: a unit that is gathered a second time in one call is gathered by itself.
        names = (name,) if bucket is None else tuple(n for n in bucket if n == name or n not in self._begun)
        self._begun.update(names)
        self._gathered.update(names)
        return names


class BackwardOrder:
    """Decide which units backward gathers again, and when.

    A *use* is one call of a unit whose gathered leaves backward needs. Uses are numbered, and each
    has a moment: an integer that grows in the order in which backward reaches the uses.

    Arguments:
        schedule: how far to gather ahead.
        buckets: which units share an all-gather.
        units: the name of the unit of each use, by number.
        reaches: whether the backward that runs may reach a use, by number. Every rank has to give
            the same answer, so it must not depend on what is in the memory of a rank.
    """

    def __init__(
        self,
        schedule: Schedule,
        buckets: Buckets,
        units: Mapping[int, str] | Sequence[str],
        reaches: Callable[[int], bool] = lambda number: True,
    ) -> None:
        self._schedule = schedule
        self._buckets = buckets
        self._units = units
        self._reaches = reaches
        self._uses: Sequence[tuple[int, int]] = ()
        self._moments: dict[int, int] = {}
        self._started: set[int] = set()
        self._gathered: set[int] = set()

    def expect(self, uses: Sequence[tuple[int, int]]) -> None:
        """Set the uses that backward will reach: ``(moment, number)`` of each, by moment."""
        self._uses = uses
        self._moments = {number: moment for moment, number in uses} if self._buckets else {}

    def gather(self, number: int) -> list[int]:
        """Return the uses to gather as backward needs ``number``; none if its gather started."""
        return [] if number in self._started else self._begin(number)

    def reach(self, number: int) -> None:
        """Note that backward computes with a use's gathered buffers; inverse of ``release``."""
        self._started.discard(number)
        self._gathered.add(number)

    def release(self, number: int) -> None:
        """Note that the gathered buffers of a use are free again."""
        self._gathered.discard(number)

    def prefetch(self, moment: int, *, most: int | None = None) -> list[list[int]]:
        """Return the uses after ``moment`` to gather ahead now, those of one all-gather together.

        Arguments:
            moment: the moment that backward has reached.
            most: the number of uses ahead; by default the schedule's limit.
        """
        found = []
        left = self._schedule.limit if most is None else most
        for position in range(bisect.bisect_left(self._uses, (moment + 1, 0)), len(self._uses)):
            number = self._uses[position][1]
            if number in self._gathered or not self._reaches(number):
                continue
            if number not in self._started and self._units[number] not in self._schedule.on_demand:
                found.append(self._begin(number))
            left -= 1
            if not left:
                break
        return found

    def _begin(self, number: int) -> list[int]:
        names = self._buckets.get(self._units[number], ())
        first: dict[str, int | None] = {self._units[number]: number}
        if names:
            moment = self._moments.get(number, 0)
            for _, other in self._uses[bisect.bisect_left(self._uses, (moment + 1, 0)) :]:
                name = self._units[other]
                if name in names and name not in first:
                    busy = other in self._started or other in self._gathered or not self._reaches(other)
                    first[name] = None if busy else other
                    if len(first) == len(names):
                        break
        found = [use for name in names or first if (use := first.get(name)) is not None]
        self._started.update(found)
        return found


Member = TypeVar("Member", bound=Hashable)
Bucket = TypeVar("Bucket", bound=Hashable)
Gradient = TypeVar("Gradient")


class ReduceOrder(Generic[Member, Bucket, Gradient]):
    """Decide when gradients are reduced, and which of them together.

    A member is one flat buffer of one unit. Members of one bucket are reduced together when the
    gradients of all that backward is expected to reach have come. A gradient is anything: the
    reducer passes tensors, the prediction names.
    """

    def __init__(self) -> None:
        self._awaited: dict[Member, int] = {}
        self._missing: dict[Bucket, set[Member]] = {}
        self._held: dict[Bucket, dict[Member, Gradient]] = {}

    def expect(self, member: Member, bucket: Bucket | None) -> None:
        """Expect one more gradient of ``member`` in the coming backward."""
        self._awaited[member] = self._awaited.get(member, 0) + 1
        if bucket is not None:
            self.hold_for(member, bucket)

    def hold_for(self, member: Member, bucket: Bucket) -> None:
        """Let the bucket wait for a gradient of ``member``."""
        self._missing.setdefault(bucket, set()).add(member)

    def arrive(self, member: Member) -> bool:
        """Note that a gradient of ``member`` has come; return whether more of it are expected."""
        left = self._awaited[member] = self._awaited.get(member, 0) - 1
        return left > 0

    def arrive_together(self, members: Collection[Member], bucket: Bucket) -> bool:
        """Note that the gradients of ``members`` have come, if a bucket waits for no others.

        Returns:
            Whether they are, and the caller reduces them now; if not, nothing is noted.
        """
        missing, awaited = self._missing.get(bucket), self._awaited
        if missing is None or bucket in self._held or missing != set(members):
            return False
        if any(awaited.get(member) != 1 for member in members):
            return False
        awaited.update(dict.fromkeys(members, 0))
        missing.clear()
        return True

    def reduce(self, member: Member, bucket: Bucket | None, gradient: Gradient) -> list[dict[Member, Gradient]]:
        """Hold a gradient of ``member`` for its bucket; return the groups to reduce now."""
        if bucket is None:
            return [{member: gradient}]
        groups = []
        if member in self._held.get(bucket, ()):  # a second gradient of a member is reduced by itself
            groups.append(self._take(bucket))
        self._held.setdefault(bucket, {})[member] = gradient
        missing = self._missing.setdefault(bucket, set())
        missing.discard(member)
        if not missing:
            groups.append(self._take(bucket))
        return groups

    def end(self) -> None:
        """Forget what backward was expected to reach."""
        self._awaited.clear()
        self._missing.clear()

    def rest(self) -> list[dict[Member, Gradient]]:
        """Return the groups that are still held: backward reached no more of their buckets."""
        return [self._take(bucket) for bucket in list(self._held)]

    def clear(self) -> None:
        """Drop the gradients that are held."""
        self._held.clear()

    def _take(self, bucket: Bucket) -> dict[Member, Gradient]:
        held = self._held.pop(bucket)
        self._missing.setdefault(bucket, set()).update(each for each in held if self._awaited.get(each, 0) > 0)
        return held
