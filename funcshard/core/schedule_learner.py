"""The schedule of a sharded function, whose order the first call teaches."""

from __future__ import annotations

import dataclasses
import itertools
import warnings

from funcshard._utils import callers_level
from funcshard.core.prefetcher import Prefetcher
from funcshard.plan import Schedule


class ScheduleLearner:
    """A sharded function's schedule; its first call may teach the order, which alters no result.

    Arguments:
        schedule: the schedule to begin with.
        known: whether its order was given, so that there is none to learn.

    Attributes:
        inside: the units that checkpoints inside them gathered in backward, as far as is known.
    """

    def __init__(self, schedule: Schedule, known: bool) -> None:
        self.schedule = schedule
        self.known = known
        self._warned = False
        self._backward_given = schedule.backward is not None
        self._backward_known: int | None = None
        self.inside: set[str] = set()

    def learn(self, prefetcher: Prefetcher) -> None:
        """Take the order of a returned call: of forward, and of the backward that may follow."""
        ran = tuple(prefetcher.ran)
        if not self.known:
            self.schedule = dataclasses.replace(self.schedule, order=ran)
            self.known = True
        elif not self._warned and self.schedule.forward_prefetch and ran != self.schedule.order:
            self._warned = True
            pairs = itertools.zip_longest(ran, self.schedule.order)
            position = next(i for i, (real, planned) in enumerate(pairs) if real != planned)
            warnings.warn(
                f"units ran in another order than the schedule's, from position {position} on: "
                "forward gathered the rest of that call on demand, which is correct but not "
                "ahead; this is said once",
                stacklevel=callers_level(),
            )
        # Why by the number: the first call does not know what checkpoints inside units need.
        if (
            not self._backward_given
            and prefetcher.sources
            and self._backward_known != len(self.inside)
        ):
            self._backward_known = len(self.inside)
            self.schedule = dataclasses.replace(self.schedule, backward=prefetcher.backward_order())
