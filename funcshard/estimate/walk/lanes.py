"""``Lanes``: the clocks of computation and communication, and the spans of a step."""

from __future__ import annotations

from typing import Protocol

from funcshard.estimate.trace import Run
from funcshard.estimate.walk.runtime import Runtime
from funcshard.estimate.walk.step import Span
from funcshard.plan import Event


class Clock(Protocol):
    """The hardware as the simulator asks it: seconds and source of everything that takes time."""

    def compute(self, run: Run) -> tuple[float, str]:
        """Return the time of a run."""

    def collective(self, event: Event) -> tuple[float, str]:
        """Return the time of a collective."""

    def copy(self, nbytes: int) -> tuple[float, str]:
        """Return the time of a copy between device and host."""

    def move(self, nbytes: int) -> tuple[float, str]:
        """Return the time in which the optimizer reads or writes so many bytes."""


class Lanes:
    """The lanes of one rank. A collective starts when its lane is free and the rank has come to it.

    Attributes:
        now: seconds since the start of the step, on the lane of computation.
        exposed: seconds in which that lane waited for a collective.
        spans: everything that ran.
    """

    def __init__(self, clock: Clock, runtime: Runtime) -> None:
        self.now = 0.0
        self.exposed = 0.0
        self.spans: list[Span] = []
        self._clock = clock
        self._runtime = runtime
        self._gathering = 0.0  # when the lane of gathers is free
        self._reducing = 0.0  # when the lane of reductions is free
        self._replicating = 0.0  # when the lane of all-reduces is free, if they have their own
        # Why the id: a work's hash takes longer than the rest, and most runs share their works.
        # Costs of runs, by the id of their works.
        self._costs: dict[int, tuple[float, str, int, int]] = {}

    def compute(self, run: Run) -> None:
        """Run a computation."""
        run_cost = self._costs.get(id(run.work))
        if run_cost is None:
            moved = sum(work.bytes for work in run.work)
            flops = sum(work.flops for work in run.work)
            run_cost = self._costs[id(run.work)] = (*self._clock.compute(run), moved, flops)
        seconds, source, moved, flops = run_cost
        if seconds:
            self.spans.append(
                Span("compute", run.what, run.unit, self.now, seconds, moved, flops, source)
            )
        self.now += seconds

    def move(self, what: str, nbytes: int) -> None:
        """Read and write bytes of device memory, as the optimizer does."""
        seconds, source = self._clock.move(nbytes)
        self.spans.append(Span("compute", what, "", self.now, seconds, nbytes, 0, source))
        self.now += seconds

    def copy(self, lane: str, nbytes: int) -> None:
        """Copy between device and host, before or after a collective of the lane."""
        seconds = self._clock.copy(nbytes)[0]
        if lane == "gather":
            self._gathering += seconds
        else:
            self._reducing += seconds

    def communicate(self, lane: str, event: Event) -> float:
        """Run a collective on its lane; return when it is over."""
        seconds, source = self._clock.collective(event)
        runtime, event_kind = self._runtime, event.kind
        if runtime.replicates_apart and event_kind == "all_reduce":
            begin = max(self.now, self._reducing, self._replicating)
            self._replicating = begin + seconds
            self.spans.append(
                Span(lane, event_kind, event.unit or "", begin, seconds, event.bytes, 0, source)
            )
            if not runtime.overlaps:
                self.wait(begin + seconds)
            return 0.0
        own_lane = self._gathering if lane == "gather" else self._reducing
        begin = (
            max(self.now, self._gathering, self._reducing)
            if runtime.one_lane
            else max(self.now, own_lane)
        )
        end = begin + seconds
        if lane == "gather":
            self._gathering = end
        else:
            self._reducing = end
        self.spans.append(
            Span(lane, event_kind, event.unit or "", begin, seconds, event.bytes, 0, source)
        )
        if not runtime.overlaps:
            self.wait(end)
        return end

    def wait(self, moment: float) -> None:
        """Let computation wait for a moment."""
        if moment > self.now:
            self.exposed += moment - self.now
            self.now = moment

    def wait_for_all(self) -> None:
        """Let computation wait for all collectives."""
        self.wait(max(self._reducing, self._gathering, self._replicating))
