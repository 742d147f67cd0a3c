"""``Scorer``: the peak and the time of a candidate by the simulator, and lower bounds of both.

A simulation takes milliseconds, a bound of many candidates microseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from funcshard.estimate.machine import Hardware
from funcshard.estimate.search.space import Candidate, UnitClass, on_mesh, unit_classes
from funcshard.estimate.trace import Profile, Program
from funcshard.estimate.walk import (
    HardwareClock,
    OptimizerMemory,
    Runtime,
    UnitSizes,
    simulate_step,
    sizes_by_unit,
)
from funcshard.plan import Accumulation, Plan, UnitPlan, make_plan, make_schedule, predict_events

_LESS = 1 - 1e-9  # sums in another order differ in their last digits


class Score(NamedTuple):
    """Seconds of a step, and bytes at the peak, named as in a ``Report``."""

    step_time: float
    peak: int


class Fixed(NamedTuple):
    """Lower bounds for all plans of a ladder."""

    held: int  # bytes between steps, and of the units that stay gathered
    communicating: float  # seconds of the collectives of a step
    updating: float  # seconds of the optimizer


def unit_options(strategy: str, unit: UnitPlan) -> dict[str, Any]:
    """Return the fields of a unit's plan that follow from a strategy."""
    # Note: the root stays gathered, because backward would gather it again at once.
    is_freed = strategy == "full_shard" and unit.name != ""
    return {"strategy": strategy, "reshard_after_forward": is_freed}


class _Base(NamedTuple):
    """A plan whose units all have the same options, with figures of its units by name."""

    plan: Plan
    sizes: Mapping[str, UnitSizes]
    seconds: Mapping[str, list[float]]  # of gathers, of reductions, and of all-reduces apart


@dataclass(slots=True, eq=False)
class Scorer:
    """Score candidates; it keeps what several of them share.

    Attributes:
        profiles: micro-batches and profile, for each way to split the batch.
        make: options of ``make_plan`` that all candidates share.
        hardware: the machine.
        optimizer: the optimizer's memory.
        runtime: how ranks communicate.
        classes: the classes of units.
        singles: the plan of each profile for one rank.
    """

    profiles: Sequence[tuple[int, Profile]]
    make: Mapping[str, Any]
    hardware: Hardware
    optimizer: OptimizerMemory | None
    runtime: Runtime
    classes: Sequence[UnitClass] = ()
    singles: Sequence[Plan] = ()
    _bases: dict[Any, _Base] = field(default_factory=dict)
    _clocks: dict[Any, HardwareClock] = field(default_factory=dict)
    _programs: dict[Any, Program] = field(default_factory=dict)
    _seconds: dict[Any, float] = field(default_factory=dict)  # of a program's computations

    def __post_init__(self) -> None:
        # Note: units are cut from the plan for one rank, which is planned once.
        self.singles = [
            make_plan(profile.forms, precision=profile.precision, **self.make)
            for _, profile in self.profiles
        ]
        program, clock = self.profiles[0][1].program(self.singles[0]), self._clock((1, 1))
        self.classes = unit_classes(self.singles[0], program, lambda run: clock.compute(run)[0])

    def plan(self, candidate: Candidate) -> Plan:
        unit_strategies = self._strategies(candidate)
        plans = {
            strategy: self._base(candidate, strategy).plan
            for strategy in set(unit_strategies.values())
        }
        # Note: all of these plans have the same units in the same order.
        first_plan = next(iter(plans.values()))
        units = tuple(
            plans[unit_strategies[unit.name]].unit_list[i]
            for i, unit in enumerate(first_plan.unit_list)
        )
        return dataclasses.replace(first_plan, unit_list=units)

    def _strategies(self, candidate: Candidate) -> dict[str, str]:
        # Note: the last units of a class stay gathered, because backward needs them first.
        strategy_of_unit: dict[str, str] = {}
        for units, choice in zip(self.classes, candidate.choices, strict=True):
            freed_count = len(units.names) - choice.kept
            for position, name in enumerate(units.names):
                is_kept = position >= freed_count and choice.strategy == "full_shard"
                strategy = "shard_grad_op" if is_kept else choice.strategy
                strategy_of_unit[name] = strategy
        return strategy_of_unit

    def remat(self, candidate: Candidate) -> tuple[str, ...]:
        """Return the names of the units that backward recomputes."""
        pairs = zip(self.classes, candidate.choices, strict=True)
        return tuple(name for units, choice in pairs for name in units.again[: choice.remat])

    def score(self, candidate: Candidate) -> Score:
        micro_batches, profile = self.profiles[candidate.profile]
        plan = self.plan(candidate)
        simulation = simulate_step(
            profile,
            plan,
            self.program(candidate),
            self._clock(candidate.mesh),
            optimizer=self.optimizer,
            runtime=self.runtime,
            schedule=make_schedule(plan),
            accumulation=Accumulation(micro_batches),
        )
        return Score(simulation.lanes.now, simulation.ledger.peak)

    def fixed(self, candidate: Candidate) -> Fixed:
        """Return the lower bounds of the candidate's ladder."""
        micro_batches, profile = self.profiles[candidate.profile]
        optimizer, runtime = self.optimizer, self.runtime
        held_bytes = profile.buffers + profile.inputs * micro_batches + runtime.communicators
        updated_bytes, lane_totals = 0, [0.0, 0.0, 0.0]
        for name, strategy in self._strategies(candidate).items():
            base = self._base(candidate, strategy)
            sizes = base.sizes[name]
            states = 0 if optimizer is None else optimizer.states_before
            held_bytes += sizes.shard + states * sizes.trainable_shard
            updated_bytes += sizes.trainable_shard
            if strategy == "shard_grad_op" and sizes.reduced:  # it stays until backward
                held_bytes += sizes.gathered
            for lane_index, unit_seconds in enumerate(base.seconds[name]):
                lane_totals[lane_index] += unit_seconds
        gathering, reducing, apart = lane_totals
        # Note: no step is faster than the busiest lane of communication.
        lane_seconds = gathering + reducing if runtime.one_lane else max(gathering, reducing)
        update_seconds = 0.0
        if optimizer is not None and updated_bytes:
            # Why 3 + 2 a state: an update reads the gradient, and reads and writes the parameter
            # and each state.
            moved_bytes = updated_bytes * (3 + 2 * optimizer.states)
            update_seconds = self._clock(candidate.mesh).move(moved_bytes)[0]
        return Fixed(held_bytes, max(lane_seconds, apart) * micro_batches, update_seconds)

    def least_seconds(self, candidate: Candidate, fixed: Fixed) -> float:
        """Return the least seconds of the candidate's ladder; the candidate is its first rung."""
        micro_batches, key = self.profiles[candidate.profile][0], self._key(candidate)
        clock = self._clock(candidate.mesh)
        if key not in self._seconds:
            runs = self.program(candidate).runs()
            self._seconds[key] = math.fsum(clock.compute(run)[0] for run in runs)
        # Note: computations of more recomputed units only take longer.
        compute_seconds = self._seconds[key] * micro_batches
        return (max(compute_seconds, fixed.communicating) + fixed.updating) * _LESS

    # --- shared by candidates --------------------------------------------------------------------

    def program(self, candidate: Candidate) -> Program:
        key = self._key(candidate)
        if key not in self._programs:
            names = self.remat(candidate)
            profile, plan = self.profiles[candidate.profile][1], self.singles[candidate.profile]
            self._programs[key] = profile.program(plan, remat=names)
        return self._programs[key]

    def _key(self, candidate: Candidate) -> tuple[int, tuple[int, ...]]:
        return candidate.profile, tuple(choice.remat for choice in candidate.choices)

    def _clock(self, mesh: tuple[int, int]) -> HardwareClock:
        axes = self.singles[0].mesh_axes | {"replicate": mesh[0], "shard": mesh[1]}
        return self._clocks.setdefault(mesh, HardwareClock(self.hardware, axes))

    def _base(self, candidate: Candidate, strategy: str) -> _Base:
        key = (candidate.profile, candidate.mesh, strategy)
        if key not in self._bases:
            options = functools.partial(unit_options, strategy)
            plan = on_mesh(self.singles[candidate.profile], candidate.mesh, options)
            self._bases[key] = self._measured(plan, candidate)
        return self._bases[key]

    def _measured(self, plan: Plan, candidate: Candidate) -> _Base:
        profile = self.profiles[candidate.profile][1]
        program = profile.program(self.singles[candidate.profile])
        clock = self._clock(candidate.mesh)
        lane_seconds = {name: [0.0, 0.0, 0.0] for name in plan.units}
        forward_order = [name for name in program.order if name in lane_seconds]
        for event in predict_events(plan, forward_order, not_saved=program.not_saved):
            lane = int(event.kind != "all_gather")
            if self.runtime.replicates_apart and event.kind == "all_reduce":
                lane = 2
            lane_seconds[event.unit or ""][lane] += clock.collective(event)[0]
        return _Base(plan, sizes_by_unit(plan, accelerator=self.runtime.accelerator), lane_seconds)
