"""``Scorer``: the peak and the time of a candidate, by the simulator; and bounds below both.

A bound takes microseconds, a simulation milliseconds. The bounds are those of any step: it takes at
least the time of all its computations, and of all its collectives; a rank holds at least what it
holds between steps, and the model's own memory at its highest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from funcshard.estimate.estimating import HardwareClock, run_step
from funcshard.estimate.machine import Hardware
from funcshard.estimate.search.space import Candidate, UnitClass
from funcshard.estimate.search.splicing import splice
from funcshard.estimate.trace import Profile, Program, Run
from funcshard.estimate.walk import OptimizerMemory, Runtime, sizes_of
from funcshard.plan import Plan, Schedule, make_plan, make_schedule, predict_events

__all__ = ["Bound", "Score", "Scorer"]

_LESS = 1 - 1e-9  # sums in another order differ in their last digits


class Bound(NamedTuple):
    """Figures that a simulation never goes below: seconds, and bytes."""

    seconds: float
    peak: int


class Score(NamedTuple):
    """The figures of a simulation: seconds of a step, and bytes at the peak."""

    seconds: float
    peak: int


class _Base(NamedTuple):
    """A plan in which all units have one strategy, and figures of its units."""

    plan: Plan
    resident: Mapping[str, int]  # bytes between steps
    gathered: Mapping[str, int]
    updated: Mapping[str, int]  # bytes that the optimizer updates on the device
    seconds: Mapping[str, tuple[float, float]]  # of gathers and of reductions


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
    _bases: dict[Any, _Base] = field(default_factory=dict)
    _clocks: dict[Any, HardwareClock] = field(default_factory=dict)
    _programs: dict[Any, Program] = field(default_factory=dict)
    _figures: dict[Any, tuple[int, int, float]] = field(default_factory=dict)

    def plan(self, candidate: Candidate) -> Plan:
        """Return the plan of a candidate."""
        mesh, offload = candidate.mesh, candidate.offload
        strategies: dict[str, str] = {}
        for each, choice in zip(self.classes, candidate.choices, strict=True):
            stay = len(each.names) - choice.kept
            for position, name in enumerate(each.names):
                strategies[name] = _strategy(choice.strategy, kept=position >= stay)
        plans = {each: self._base(candidate.profile, mesh, offload, each).plan for each in {*strategies.values()}}
        first = next(iter(plans.values()))
        units = tuple(plans[strategies[unit.name]].unit_list[i] for i, unit in enumerate(first.unit_list))
        if not candidate.bucket:
            return dataclasses.replace(first, unit_list=units)
        options = {
            unit.members or unit.name: {"strategy": unit.strategy, "reshard_after_forward": unit.reshard_after_forward}
            for unit in units
            if not unit.full_precision
        }
        return self._made(candidate.profile, mesh, offload, "full_shard", units=options, bucket_bytes=candidate.bucket)

    def remat(self, candidate: Candidate) -> tuple[str, ...]:
        """Return the names of the units that backward computes again."""
        pairs = zip(self.classes, candidate.choices, strict=True)
        return tuple(name for units, choice in pairs for name in _able(units)[: choice.remat])

    def schedule(self, candidate: Candidate, plan: Plan) -> Schedule:
        """Return the schedule of a candidate."""
        return make_schedule(plan, limit=candidate.limit)

    def score(self, candidate: Candidate) -> Score:
        """Simulate a candidate."""
        micro_batches, profile = self.profiles[candidate.profile]
        plan = self.plan(candidate)
        found, _ = run_step(
            profile, plan, self.program(candidate), self._clock(candidate.mesh), optimizer=self.optimizer,
            schedule=self.schedule(candidate, plan), micro_batches=micro_batches, runtime=self.runtime,
        )  # fmt: skip
        return Score(found.step_time, found.peak)

    def bound(self, candidate: Candidate) -> Bound:
        """Return figures that the simulation of a candidate does not go below."""
        micro_batches, profile = self.profiles[candidate.profile]
        highest, at_loss, computing = self._figures_of(candidate)
        resident = profile.buffers + profile.inputs * micro_batches + self.runtime.communicators
        updated, kept, gathers, reductions = 0, 0, 0.0, 0.0
        for units, choice in zip(self.classes, candidate.choices, strict=True):
            stay = len(units.names) - choice.kept
            for stays, names in ((False, units.names[:stay]), (True, units.names[stay:])):
                base = self._base(
                    candidate.profile, candidate.mesh, candidate.offload, _strategy(choice.strategy, kept=stays)
                )
                for name in names:
                    resident += base.resident[name]
                    updated += base.updated[name]
                    kept += base.gathered[name] if stays else 0
                    gathers += base.seconds[name][0]
                    reductions += base.seconds[name][1]
        lane = gathers + reductions if self.runtime.one_lane else max(gathers, reductions)
        # Why 0 for buckets: they save latencies.
        communicating = 0.0 if candidate.bucket else lane * micro_batches
        states = self.optimizer.states if self.optimizer is not None else 0
        moved = updated * (3 + 2 * states) if self.optimizer is not None else 0
        last = self._clock(candidate.mesh).move(moved)[0] if moved else 0.0
        seconds = max(computing * micro_batches, communicating) + last
        return Bound(seconds * _LESS, resident + max(highest, at_loss + kept))

    # --- shared by candidates --------------------------------------------------------------------

    def program(self, candidate: Candidate) -> Program:
        """Return the program of a candidate's remat set."""
        counts = tuple(choice.remat for choice in candidate.choices)
        key = (candidate.profile, counts)
        if key not in self._programs:
            found = None if self.exact else self._spliced(candidate, counts)
            self._programs[key] = found if found is not None else self._traced(candidate.profile, counts)
        return self._programs[key]

    def _spliced(self, candidate: Candidate, counts: tuple[int, ...]) -> Program | None:
        """Return the program from that of another number of units, of the largest class."""
        largest = max(range(len(counts)), key=lambda i: (self.classes[i].repeated, len(self.classes[i].names)))
        names = self.classes[largest].names
        middle = len(names) // 2
        if not self.classes[largest].repeated or counts[largest] == middle:
            return None
        other = (*counts[:largest], middle, *counts[largest + 1 :])
        # Why first: it costs nothing if the counts are too near to an end.
        if min(middle, counts[largest], len(names) - middle, len(names) - counts[largest]) <= 3:
            return None
        return splice(self._traced(candidate.profile, other), names, middle, counts[largest])

    def _traced(self, number: int, counts: tuple[int, ...]) -> Program:
        _, profile = self.profiles[number]
        names = [name for units, k in zip(self.classes, counts, strict=True) for name in _able(units)[:k]]
        return profile.program(self._base(number, None, False, "full_shard").plan, remat=names)

    def _figures_of(self, candidate: Candidate) -> tuple[int, int, float]:
        """Return a program's highest memory, that of the loss, and its seconds."""
        key = (candidate.profile, tuple(choice.remat for choice in candidate.choices))
        if key not in self._figures:
            runs = [step for step in self.program(candidate).steps if isinstance(step, Run)]
            clock = self._clock(candidate.mesh)
            highest = max((run.highest.total for run in runs), default=0)
            at_loss = max((run.highest.total for run in runs if run.what == "loss"), default=0)
            self._figures[key] = highest, at_loss, math.fsum(clock.compute(run)[0] for run in runs)
        return self._figures[key]

    def _clock(self, mesh: tuple[int, int]) -> HardwareClock:
        if mesh not in self._clocks:
            self._clocks[mesh] = HardwareClock(self.hardware, {"replicate": mesh[0], "shard": mesh[1]})
        return self._clocks[mesh]

    def _made(self, number: int, mesh: tuple[int, int] | None, offload: bool, strategy: str, **more: Any) -> Plan:
        profile = self.profiles[number][1]
        axes = 1 if mesh is None else {"replicate": mesh[0], "shard": mesh[1]}
        shared = {**self.make, "ties": profile.ties, "precision": profile.precision, **more}
        return make_plan(profile.forms, axes, offload=offload, strategy=strategy, **shared)

    def _base(self, number: int, mesh: tuple[int, int] | None, offload: bool, strategy: str) -> _Base:
        """Return the plan in which all units have one strategy; without a mesh, for one rank."""
        key = (number, mesh, offload, strategy)
        if key not in self._bases:
            if mesh is None:
                plan = self._made(number, mesh, offload, strategy)
            else:
                plan = _on_mesh(self._base(number, None, False, "full_shard").plan, mesh, offload, strategy)
            self._bases[key] = self._measured(number, plan, mesh)
        return self._bases[key]

    def _measured(self, number: int, plan: Plan, mesh: tuple[int, int] | None) -> _Base:
        states = self.optimizer.states if self.optimizer is not None else 0
        resident: dict[str, int] = {}
        gathered: dict[str, int] = {}
        updated: dict[str, int] = {}
        seconds = dict.fromkeys(plan.units, (0.0, 0.0))
        if mesh is None:
            return _Base(plan, resident, gathered, updated, seconds)
        known: dict[Any, tuple[int, int, int]] = {}
        for unit in plan.unit_list:
            forms = tuple((each.key, each.numel, each.shards, each.local) for each in unit.buffers)
            if (key := (forms, unit.precision)) not in known:
                sizes = sizes_of(unit, accelerator=self.runtime.accelerator)
                device = not sizes.offload
                held = (sizes.shard + states * sizes.trainable_shard) if device else 0
                trained = sum(each.gathered for each in sizes.buffers if each.trainable)
                known[key] = held, trained, sizes.trainable_shard if device else 0
            resident[unit.name], gathered[unit.name], updated[unit.name] = known[key]
        program = self._traced(number, (0,) * len(self.classes))
        units, clock = plan.units, self._clock(mesh)
        for event in predict_events(plan, [name for name in program.order if name in units], not_saved=program.not_saved):
            lane = int(event.kind != "all_gather")
            both = list(seconds[event.unit or ""])
            both[lane] += clock.collective(event)[0]
            seconds[event.unit or ""] = both[0], both[1]
        return _Base(plan, resident, gathered, updated, seconds)


def _on_mesh(plan: Plan, mesh: tuple[int, int], offload: bool, strategy: str) -> Plan:
    """Return the plan that ``make_plan`` makes for another mesh, in a tenth of its time."""
    shards = 1 if strategy == "no_shard" else mesh[1]
    units = []
    for unit in plan.unit_list:
        buffers = tuple(dataclasses.replace(each, shards=1 if "shard" in each.local else shards) for each in unit.buffers)
        freed = strategy == "full_shard" and unit.name != ""
        units.append(
            dataclasses.replace(
                unit, strategy=strategy, reshard_after_forward=freed, mesh_shape=mesh, buffers=buffers, offload=offload
            )
        )
    return dataclasses.replace(plan, mesh_shape=mesh, unit_list=tuple(units))


def _strategy(strategy: str, *, kept: bool) -> str:
    return "shard_grad_op" if kept and strategy == "full_shard" else strategy


def _able(units: UnitClass) -> tuple[str, ...]:
    """Return the units that backward can compute again: all but the root."""
    return tuple(name for name in units.names if name)
