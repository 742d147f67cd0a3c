"""``Scorer``: the peak and the time of a candidate, by the simulator; and figures below both.

A simulation takes milliseconds, a lower bound of many of them microseconds: any step takes at least
the time of all its computations, and of all its collectives, and a rank holds at least what it
holds between steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from funcshard.estimate.estimating import run_step
from funcshard.estimate.machine import Hardware
from funcshard.estimate.search.space import Candidate, UnitClass, on_mesh
from funcshard.estimate.search.splicing import MARGIN, in_pieces, splice
from funcshard.estimate.trace import Profile, Program, Run
from funcshard.estimate.walk import (
    HardwareClock,
    OptimizerMemory,
    Runtime,
    UnitSizes,
    sizes_by_unit,
)
from funcshard.plan import Plan, Schedule, UnitPlan, make_plan, make_schedule, predict_events

_LESS = 1 - 1e-9  # sums in another order differ in their last digits


class Score(NamedTuple):
    """The figures of a simulation: seconds of a step, and bytes at the peak."""

    seconds: float
    peak: int


class Fixed(NamedTuple):
    """Figures that no step of a ladder's plans goes below."""

    held: int  # bytes between steps, and of the units that stay gathered
    communicating: float  # seconds of the collectives of a step
    updating: float  # seconds of the optimizer


class _Mode(NamedTuple):
    """The options of a unit that a search chooses."""

    strategy: str
    offload: bool
    slices: int

    def options(self, unit: UnitPlan) -> dict[str, Any]:
        """Return the options of a unit as fields of its plan."""
        # Note: the root stays gathered, because backward would gather it again at once.
        freed = self.strategy == "full_shard" and unit.name != ""
        return {
            "strategy": self.strategy,
            "offload": self.offload,
            "reshard_after_forward": freed and (self.slices or True),
        }


class _Base(NamedTuple):
    """A plan in which all units have the same options, and figures of its units by name."""

    plan: Plan
    sizes: Mapping[str, UnitSizes]
    seconds: Mapping[str, list[float]]  # of gathers, of reductions, and of all-reduces apart


@dataclass(slots=True, eq=False)
class Scorer:
    """Score candidates; it keeps what several of them share.

    Attributes:
        profiles: number of micro-batches and profile, for each way to split the batch.
        make: options of ``make_plan`` that all candidates share, such as ``units``.
        classes: the classes of units.
        hardware: the machine.
        optimizer: the optimizer's memory.
        runtime: how ranks communicate.
    """

    profiles: Sequence[tuple[int, Profile]]
    make: Mapping[str, Any]
    classes: Sequence[UnitClass]
    hardware: Hardware
    optimizer: OptimizerMemory | None
    runtime: Runtime
    exact: bool = False  # whether to trace each remat set, in place of splicing programs
    _singles: dict[int, Plan] = field(default_factory=dict)
    _bases: dict[Any, _Base] = field(default_factory=dict)
    _clocks: dict[Any, HardwareClock] = field(default_factory=dict)
    _programs: dict[Any, Program] = field(default_factory=dict)
    _seconds: dict[Any, float] = field(default_factory=dict)  # of a program's computations

    def plan(self, candidate: Candidate) -> Plan:
        """Return the plan of a candidate."""
        modes = self._modes(candidate)
        plans = {mode: self._base(candidate, mode).plan for mode in set(modes.values())}
        first = next(iter(plans.values()))
        units = tuple(
            plans[modes[unit.name]].unit_list[i] for i, unit in enumerate(first.unit_list)
        )
        return dataclasses.replace(first, unit_list=units)

    def _modes(self, candidate: Candidate) -> dict[str, _Mode]:
        """Return the options of each unit."""
        modes_by_unit: dict[str, _Mode] = {}
        for units, choice in zip(self.classes, candidate.choices, strict=True):
            freed = len(units.names) - choice.kept
            for position, name in enumerate(units.names):
                kept = position >= freed and choice.strategy == "full_shard"
                strategy = "shard_grad_op" if kept else choice.strategy
                modes_by_unit[name] = _Mode(strategy, choice.offload, 0 if kept else choice.slices)
        return modes_by_unit

    def remat(self, candidate: Candidate) -> tuple[str, ...]:
        """Return the names of the units that backward computes again."""
        pairs = zip(self.classes, candidate.choices, strict=True)
        return tuple(name for units, choice in pairs for name in units.again[: choice.remat])

    def splices(self) -> bool:
        """Return whether the programs of other numbers of the largest class can be spliced."""
        largest = max(self.classes, key=lambda each: (each.repeated, len(each.names)))
        plain = self._traced(0, (0,) * len(self.classes))
        return not self.exact and largest.repeated and in_pieces(plain, largest.names)

    def schedule(self, candidate: Candidate, plan: Plan) -> Schedule:
        """Return the schedule of a candidate."""
        return make_schedule(plan, limit=candidate.limit)

    def score(self, candidate: Candidate) -> Score:
        """Simulate a candidate."""
        micro_batches, profile = self.profiles[candidate.profile]
        plan = self.plan(candidate)
        simulation, _ = run_step(
            profile, plan, self.program(candidate), self._clock(candidate.mesh), optimizer=self.optimizer,
            schedule=self.schedule(candidate, plan), micro_batches=micro_batches, runtime=self.runtime,
        )  # fmt: skip
        return Score(simulation.step_time, simulation.peak)

    def fixed(self, candidate: Candidate) -> Fixed:
        """Return what all rungs of the candidate's ladder share."""
        micro_batches, profile = self.profiles[candidate.profile]
        optimizer, runtime = self.optimizer, self.runtime
        held = profile.buffers + profile.inputs * micro_batches + runtime.communicators
        updated, seconds = 0, [0.0, 0.0, 0.0]
        for name, mode in self._modes(candidate).items():
            base = self._base(candidate, mode)
            sizes = base.sizes[name]
            if not sizes.offload:
                states = 0 if optimizer is None else optimizer.states_before
                held += sizes.shard + states * sizes.trainable_shard
                updated += sizes.trainable_shard
            if mode.strategy == "shard_grad_op" and sizes.reduced:  # it stays until backward
                held += sizes.gathered
            for lane_index, unit_seconds in enumerate(base.seconds[name]):
                seconds[lane_index] += unit_seconds
        gathering, reducing, apart = seconds
        lane = gathering + reducing if runtime.one_lane else max(gathering, reducing)
        updating = 0.0
        if optimizer is not None and updated:
            moved = updated * (3 + 2 * optimizer.states)
            updating = self._clock(candidate.mesh).move(moved)[0]
        return Fixed(held, max(lane, apart) * micro_batches, updating)

    def least_seconds(self, candidate: Candidate, fixed: Fixed) -> float:
        """Return seconds that no rung of the candidate's ladder goes below; it is the first one."""
        micro_batches, key = self.profiles[candidate.profile][0], self._key(candidate)
        clock = self._clock(candidate.mesh)
        if key not in self._seconds:
            runs = [step for step in self.program(candidate).steps if isinstance(step, Run)]
            self._seconds[key] = math.fsum(clock.compute(run)[0] for run in runs)
        computing = self._seconds[key] * micro_batches
        return (max(computing, fixed.communicating) + fixed.updating) * _LESS

    # --- shared by candidates --------------------------------------------------------------------

    def program(self, candidate: Candidate) -> Program:
        """Return the program of a candidate's remat set."""
        key = _, counts = self._key(candidate)
        if key not in self._programs:
            spliced_program = None if self.exact else self._spliced(candidate, counts)
            self._programs[key] = spliced_program or self._traced(candidate.profile, counts)
        return self._programs[key]

    def _key(self, candidate: Candidate) -> tuple[int, tuple[int, ...]]:
        return candidate.profile, tuple(choice.remat for choice in candidate.choices)

    def _spliced(self, candidate: Candidate, counts: tuple[int, ...]) -> Program | None:
        """Return the program from that of another number of units, of the largest class."""
        largest = max(
            range(len(counts)), key=lambda i: (self.classes[i].repeated, len(self.classes[i].names))
        )
        names, wanted = self.classes[largest].names, counts[largest]
        middle = len(names) // 2
        # Why first: splice would return None too, but only after the trace of the middle.
        borders = (middle, wanted, len(names) - middle, len(names) - wanted)
        if not self.classes[largest].repeated or wanted == middle or min(borders) <= MARGIN:
            return None
        middle_counts = (*counts[:largest], middle, *counts[largest + 1 :])
        return splice(self._traced(candidate.profile, middle_counts), names, middle, wanted)

    def _traced(self, profile_index: int, counts: tuple[int, ...]) -> Program:
        names = [
            name
            for units, count in zip(self.classes, counts, strict=True)
            for name in units.again[:count]
        ]
        return self.profiles[profile_index][1].program(self._single(profile_index), remat=names)

    def _clock(self, mesh: tuple[int, int]) -> HardwareClock:
        if mesh not in self._clocks:
            axes = {"replicate": mesh[0], "shard": mesh[1]}
            self._clocks[mesh] = HardwareClock(self.hardware, axes)
        return self._clocks[mesh]

    def _single(self, profile_index: int) -> Plan:
        """Return the plan for one rank."""
        if profile_index not in self._singles:
            profile = self.profiles[profile_index][1]
            self._singles[profile_index] = make_plan(
                profile.forms, 1, ties=profile.ties, precision=profile.precision, **self.make
            )
        return self._singles[profile_index]

    def _base(self, candidate: Candidate, mode: _Mode) -> _Base:
        """Return the plan in which all units have the same options."""
        key = (candidate.profile, candidate.mesh, mode)
        if key not in self._bases:
            plan = on_mesh(self._single(candidate.profile), candidate.mesh, mode.options)
            self._bases[key] = self._measured(plan, candidate)
        return self._bases[key]

    def _measured(self, plan: Plan, candidate: Candidate) -> _Base:
        program = self._traced(candidate.profile, (0,) * len(self.classes))
        clock = self._clock(candidate.mesh)
        seconds = {name: [0.0, 0.0, 0.0] for name in plan.units}
        order = [name for name in program.order if name in seconds]
        for event in predict_events(plan, order, not_saved=program.not_saved):
            lane = int(event.kind != "all_gather")
            if self.runtime.replicates_apart and event.kind == "all_reduce":
                lane = 2
            seconds[event.unit or ""][lane] += clock.collective(event)[0]
        return _Base(plan, sizes_by_unit(plan, accelerator=self.runtime.accelerator), seconds)
