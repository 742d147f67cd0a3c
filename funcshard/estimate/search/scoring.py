"""``Scorer``: the peak and the time of a candidate by the simulator, and lower bounds of both.

A simulation takes milliseconds, a bound of many candidates microseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from funcshard.estimate.machine import Hardware, update_time
from funcshard.estimate.search.space import Candidate, UnitClass, on_mesh, unit_classes
from funcshard.estimate.trace import Profile, Program, Run, once
from funcshard.estimate.walk import (
    HardwareClock,
    OptimizerMemory,
    Runtime,
    UnitSizes,
    simulate_step,
    sizes_by_unit,
)
from funcshard.plan import (
    Accumulation,
    Event,
    Plan,
    Reached,
    UnitPlan,
    make_plan,
    make_schedule,
    predict_events,
)

_LESS = 1 - 1e-9  # sums in another order differ in their last digits


class Score(NamedTuple):
    """Seconds of a step, and bytes at the peak, named as in a ``Report``."""

    step_time: float
    peak: int


class Fixed(NamedTuple):
    """Lower bounds for all plans of a ladder."""

    resting: int  # bytes between steps
    held: int  # those, and the bytes of the units that stay gathered
    after: float  # seconds of the reductions after the last one
    gathering: float  # seconds of the gathers of a forward
    backward: float  # seconds of the collectives of a backward
    stalled: float  # seconds in which backward waits for reductions beside no computation
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
    seconds: Mapping[
        str, list[float]
    ]  # of gathers, of reductions, and of all-reduces apart
    once: Mapping[str, list[float]]  # of one gather, and of one reduction
    first: Mapping[str, float]  # of the first collective of a reduction
    late: Mapping[str, float]  # of the last buffer's collectives along further mesh axes


class _Bounds(NamedTuple):
    """What bounds the time and the peak of all plans with one program.

    Attributes:
        forward: seconds of its computations until backward.
        backward: seconds of those afterwards.
        calls: how often forward calls each unit.
        highest: most bytes of the model's own tensors.
        between: their bytes between forward and backward.
        last: the units that are reduced after the last one.
        reduced: all units in the order of their reductions.
    """

    forward: float
    backward: float
    calls: Counter[str]
    highest: int
    between: int
    last: set[str]
    reduced: list[str]


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
    _made: dict[Any, Any] = field(
        default_factory=dict
    )  # programs, clocks, bounds and bases

    def __post_init__(self) -> None:
        # Note: units are cut from the plan for one rank, which is planned once.
        self.singles = [
            make_plan(profile.forms, precision=profile.precision, **self.make)
            for _, profile in self.profiles
        ]
        program, clock = self.profiles[0][1].program(self.singles[0]), self._clock((1, 1))
        self.classes = unit_classes(
            self.singles[0], program, lambda run: clock.compute(run)[0]
        )

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
        return tuple(
            name for units, choice in pairs for name in units.again[: choice.remat]
        )

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
        bounds = self._bounds_of(candidate)
        unit_strategies = self._strategies(candidate)
        base_of = {
            strategy: self._base(candidate, strategy)
            for strategy in {*unit_strategies.values()}
        }
        bases = {name: base_of[strategy] for name, strategy in unit_strategies.items()}
        unit_sizes = {name: base.sizes[name] for name, base in bases.items()}
        updated_bytes = sum(sizes.trainable_shard for sizes in unit_sizes.values())
        resting_bytes = (
            profile.buffers + profile.inputs * micro_batches + runtime.communicators
        )
        resting_bytes += sum(sizes.shard for sizes in unit_sizes.values())
        if optimizer is not None:
            resting_bytes += optimizer.states_before * updated_bytes
        kept_bytes = sum(
            sizes.gathered
            for name, sizes in unit_sizes.items()
            if unit_strategies[name] == "shard_grad_op" and sizes.reduced  # until backward
        )
        forward_seconds = backward_seconds = 0.0
        last_seconds = [0.0, 0.0]  # on the lane of reductions, and on that of all-reduces
        for name, base in bases.items():
            gathers, reductions, _ = base.seconds[name]
            one_gather, *one_reduction = base.once[name]
            calls = bounds.calls[name]
            forward_seconds += one_gather * (calls > 0)
            # Note: a unit that is called again may be gathered once more, or stay gathered.
            backward_seconds += reductions + max(gathers - calls * one_gather, 0.0)
            if name in bounds.last:
                last_seconds = list(map(operator.add, last_seconds, one_reduction))
        stalled_seconds = 0.0
        reduced_units = [
            name
            for name in bounds.reduced
            if name in bases and bases[name].sizes[name].reduced
        ]
        # Note: a reduction along further axes starts behind that of the next unit, and then the
        # rank waits for it.
        for name, next_name in itertools.pairwise(reduced_units):
            late_seconds = bases[name].late[name]
            if late_seconds and not runtime.replicates_apart:
                stalled_seconds += late_seconds + bases[next_name].first[next_name]
        update_seconds = 0.0
        if optimizer is not None and updated_bytes:
            # Why 3 + 2 a state: an update reads the gradient, and reads and writes the parameter
            # and each state.
            moved_bytes = updated_bytes * (3 + 2 * optimizer.states)
            update_seconds = update_time(self.hardware, moved_bytes).seconds
        return Fixed(
            resting=resting_bytes,
            held=resting_bytes + kept_bytes,
            after=max(last_seconds),
            gathering=forward_seconds,
            backward=backward_seconds,
            stalled=stalled_seconds,
            updating=update_seconds,
        )

    def least(self, candidate: Candidate, fixed: Fixed) -> Score:
        """Return the least peak of a candidate, and the least seconds from it up on its ladder."""
        micro_batches = self.profiles[candidate.profile][0]
        bounds = self._bounds_of(candidate)
        # Note: forward waits for all of its gathers, and backward or the next forward for the
        # collectives of backward.
        first_seconds = max(bounds.forward, fixed.gathering)
        middle_seconds = bounds.forward + max(
            bounds.backward + fixed.stalled, fixed.backward
        )
        last_seconds = max(
            bounds.backward + max(fixed.stalled, fixed.after), fixed.backward
        )
        step_seconds = first_seconds + (micro_batches - 1) * middle_seconds + last_seconds
        return Score(
            (step_seconds + fixed.updating) * _LESS,
            max(fixed.resting + bounds.highest, fixed.held + bounds.between),
        )

    # --- shared by candidates --------------------------------------------------------------------

    def program(self, candidate: Candidate) -> Program:
        profile, plan = self.profiles[candidate.profile][1], self.singles[candidate.profile]
        return once(
            self._made,
            ("program", *self._key(candidate)),
            lambda: profile.program(plan, remat=self.remat(candidate)),
        )

    def _bounds_of(self, candidate: Candidate) -> _Bounds:
        def bounds() -> _Bounds:
            program, clock = self.program(candidate), self._clock(candidate.mesh)
            steps, runs = program.steps, list(program.runs())

            def takes_none(step: Run | Reached) -> bool:
                return isinstance(step, Reached) or not clock.compute(step)[0]

            last_steps = itertools.takewhile(takes_none, reversed(steps))
            forward_steps = steps[: steps.index(Reached("backward", ""))]
            forward_runs = [step for step in forward_steps if isinstance(step, Run)]
            return _Bounds(
                forward=math.fsum(clock.compute(run)[0] for run in forward_runs),
                backward=math.fsum(
                    clock.compute(run)[0] for run in runs[len(forward_runs) :]
                ),
                calls=Counter(program.order),
                highest=max(run.highest.total for run in runs),
                between=forward_runs[-1].end.total,
                last={step.unit for step in last_steps if step.what == "reduce"},
                reduced=[place.unit for place in program.reached if place.what == "reduce"],
            )

        return once(self._made, ("bounds", *self._key(candidate)), bounds)

    def _key(self, candidate: Candidate) -> tuple[int, tuple[int, ...]]:
        return candidate.profile, tuple(choice.remat for choice in candidate.choices)

    def _clock(self, mesh: tuple[int, int]) -> HardwareClock:
        axes = self.singles[0].mesh_axes | {"replicate": mesh[0], "shard": mesh[1]}
        return once(self._made, mesh, lambda: HardwareClock(self.hardware, axes))

    def _base(self, candidate: Candidate, strategy: str) -> _Base:
        def base() -> _Base:
            options = functools.partial(unit_options, strategy)
            single_plan = self.singles[candidate.profile]
            plan = on_mesh(single_plan, candidate.mesh, options)
            profile = self.profiles[candidate.profile][1]
            program = profile.program(single_plan)
            clock = self._clock(candidate.mesh)
            lane_seconds = {name: [0.0, 0.0, 0.0] for name in plan.units}
            once_seconds = {name: [0.0, 0.0, 0.0] for name in plan.units}
            first_seconds = dict.fromkeys(plan.units, 0.0)
            late_seconds = first_seconds.copy()
            events, begun = set[Event](), set[tuple[str, str]]()
            forward_order = [name for name in program.order if name in lane_seconds]
            for event in predict_events(plan, forward_order, not_saved=program.not_saved):
                lane = int(event.kind != "all_gather")
                if self.runtime.replicates_apart and event.kind == "all_reduce":
                    lane = 2
                seconds, name = clock.collective(event)[0], event.unit or ""
                lane_seconds[name][lane] += seconds
                if event in events:
                    continue
                events.add(event)
                once_seconds[name][lane] += seconds
                if event.kind == "all_gather":
                    continue
                if (name, event.buffer) in begun:
                    late_seconds[name] += seconds
                else:
                    begun.add((name, event.buffer))
                    late_seconds[name] = 0.0
                    first_seconds[name] = first_seconds[name] or seconds
            unit_sizes = sizes_by_unit(plan, accelerator=self.runtime.accelerator)
            return _Base(
                plan, unit_sizes, lane_seconds, once_seconds, first_seconds, late_seconds
            )

        return once(self._made, (candidate.profile, candidate.mesh, strategy), base)
