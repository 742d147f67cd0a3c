"""``HardwareClock`` and ``Lanes``: how long things take, and when they run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from funcshard.estimate.machine import (
    Hardware,
    collective_time,
    compute_time,
    offload_time,
    source_of_sum,
    update_time,
)
from funcshard.estimate.trace import Run, Work
from funcshard.estimate.walk.runtime import Runtime
from funcshard.plan import Event

LANES = ("compute", "gather", "reduce", "replicate")


class Span(NamedTuple):
    """One computation or collective, and when it runs.

    Attributes:
        lane: one of ``LANES``; all-reduces that run apart have the last one.
        what: ``"forward"``, ``"backward"``, ``"loss"``, ``"optimizer"``, or the kind of collective.
        unit: name of the unit; ``""`` is the root.
        begin: seconds since the start of the step.
        bytes: bytes that a computation moves, or of the collective's whole buffer.
    """

    lane: str
    what: str
    unit: str
    begin: float
    seconds: float
    bytes: int
    flops: int
    source: str

    @property
    def end(self) -> float:
        return self.begin + self.seconds


@dataclass(slots=True, eq=False)
class HardwareClock:
    """The time of everything that a step does on some hardware, with its source."""

    hardware: Hardware
    mesh_axes: Mapping[str, int]
    _costs: dict[int, tuple[tuple[float, int, int, str], Any]] = field(default_factory=dict)
    _collectives: dict[Any, tuple[float, str]] = field(default_factory=dict)

    def compute(self, run: Run) -> tuple[float, int, int, str]:
        """Return the seconds of a run, its bytes and FLOPs, and the source of the seconds."""
        # Why the id: a work's hash takes longer than the rest, and most runs share their works.
        known = self._costs.get(id(run.work))
        if known is None:
            times = [self._work(work) for work in run.work]
            cost = (
                math.fsum(seconds for seconds, _ in times),
                sum(work.bytes for work in run.work),
                sum(work.flops for work in run.work),
                source_of_sum(times),
            )
            known = self._costs[id(run.work)] = cost, run.work  # which must live on
        return known[0]

    def _work(self, work: Work) -> tuple[float, str]:
        kind, _, axis = work.dtype.partition(" ")
        if not axis:
            return compute_time(
                self.hardware, work.flops, work.bytes, work.dtype, kernels=work.kernels
            )
        # Note: the rank waits for each collective of the model.
        each_bytes, ranks = work.bytes // work.kernels, self.mesh_axes.get(axis, 1)
        seconds, source = self.collective(
            Event(kind, None, "", "", each_bytes, axis, ranks)
        )
        return work.kernels * seconds, source

    def collective(self, event: Event) -> tuple[float, str]:
        event_key = (event.kind, event.bytes, event.axis, event.ranks)
        event_time = self._collectives.get(event_key)
        if event_time is None:
            stride, axes = 1, list(self.mesh_axes)
            # Note: ranks are numbered row by row, so those along the last axis are neighbours, and
            # so are those of an axis that hold a unit together.
            if event.ranks == self.mesh_axes.get(event.axis):
                stride = math.prod(
                    map(self.mesh_axes.__getitem__, axes[axes.index(event.axis) + 1 :])
                )
            event_time = self._collectives[event_key] = collective_time(
                self.hardware, event.kind, event.bytes, event.ranks, stride=stride
            )
        return event_time


class Lanes:
    """The lanes of one rank, and what runs on them.

    Attributes:
        now: seconds since the start of the step, on the lane of computation.
        exposed: seconds in which that lane waited for a collective.
    """

    def __init__(self, clock: HardwareClock, runtime: Runtime) -> None:
        self.now = 0.0
        self.exposed = 0.0
        self.spans: list[Span] = []
        self._clock = clock
        self._runtime = runtime
        # When each lane is free; all-reduces have their own lane, or that of reductions.
        self._free = {"gather": 0.0, "reduce": 0.0, "replicate": 0.0}

    def compute(self, run: Run) -> None:
        cost = self._clock.compute(run)
        if cost[0]:
            self.spans.append(Span("compute", run.what, run.unit, self.now, *cost))
        self.now += cost[0]

    def update(self, nbytes: int) -> None:
        """Read and write device memory, as the optimizer does."""
        seconds, source = update_time(self._clock.hardware, nbytes)
        self.spans.append(
            Span("compute", "optimizer", "", self.now, seconds, nbytes, 0, source)
        )
        self.now += seconds

    def copy(self, lane: str, nbytes: int) -> None:
        """Copy between device and host, beside a collective of the lane."""
        self._free[lane] += offload_time(self._clock.hardware, nbytes).seconds

    def communicate(self, lane: str, event: Event) -> float:
        """Run a collective on its lane; return when it's over."""
        seconds, source = self._clock.collective(event)
        runtime, free_times = self._runtime, self._free
        runs_apart = runtime.replicates_apart and event.kind == "all_reduce"
        # Note: a collective starts when the rank has come to it and its lane is free. Gathers and
        # reductions run one after the other.
        waited_lanes = (lane, "replicate") if runs_apart else ("gather", "reduce")
        begin = max(self.now, *[free_times[waited_lane] for waited_lane in waited_lanes])
        end = begin + seconds
        if runs_apart:
            lane = "replicate"
        free_times[lane] = end
        self.spans.append(
            Span(lane, event.kind, event.unit or "", begin, seconds, event.bytes, 0, source)
        )
        if not runtime.overlaps:
            self.wait(end)
        # Note: all-reduces with their own lane are waited for after backward.
        return 0.0 if runs_apart else end

    def wait(self, moment: float) -> None:
        if moment > self.now:
            self.exposed += moment - self.now
            self.now = moment

    def wait_for_all(self) -> None:
        self.wait(max(self._free.values()))
