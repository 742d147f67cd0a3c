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

from funcshard.estimate.estimating import HardwareClock, run_step
from funcshard.estimate.machine import Hardware
from funcshard.estimate.search.space import Candidate, UnitClass
from funcshard.estimate.search.splicing import in_pieces, splice
from funcshard.estimate.trace import Profile, Program, Run
from funcshard.estimate.walk import OptimizerMemory, Runtime, sizes_of
from funcshard.plan import Plan, Schedule, make_plan, make_schedule, predict_events

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


class _Base(NamedTuple):
    """A plan in which all units have the same options, and figures of its units."""

    plan: Plan
    resident: Mapping[str, int]  # bytes between steps
    gathered: Mapping[str, int]  # bytes that stay until backward if the unit is not freed
    updated: Mapping[str, int]  # bytes that the optimizer updates on the device
    # Seconds of gathers, reductions, and all-reduces.
    seconds: Mapping[str, tuple[float, float, float]]


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
        profile_index, mesh = candidate.profile, candidate.mesh
        modes = self._modes(candidate)
        plans = {
            mode: self._base(profile_index, mesh, mode).plan
            for mode in dict.fromkeys(modes.values())
        }
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
        held = profile.buffers + profile.inputs * micro_batches + self.runtime.communicators
        updated, gathers, reductions, apart = 0, 0.0, 0.0, 0.0
        for name, mode in self._modes(candidate).items():
            base = self._base(candidate.profile, candidate.mesh, mode)
            held += base.resident[name] + (
                base.gathered[name] if mode.strategy == "shard_grad_op" else 0
            )
            updated += base.updated[name]
            gathers += base.seconds[name][0]
            reductions += base.seconds[name][1]
            apart += base.seconds[name][2]
        lane = gathers + reductions if self.runtime.one_lane else max(gathers, reductions)
        lane = max(lane, apart)
        states = self.optimizer.states if self.optimizer is not None else 0
        moved = updated * (3 + 2 * states) if self.optimizer is not None else 0
        updating = self._clock(candidate.mesh).move(moved)[0] if moved else 0.0
        return Fixed(held, lane * micro_batches, updating)

    def least_seconds(self, candidate: Candidate, fixed: Fixed) -> float:
        """Return seconds that no rung of the candidate's ladder goes below; it is the first one."""
        micro_batches = self.profiles[candidate.profile][0]
        key = self._key(candidate)
        if key not in self._seconds:
            runs = [step for step in self.program(candidate).steps if isinstance(step, Run)]
            self._seconds[key] = math.fsum(
                self._clock(candidate.mesh).compute(run)[0] for run in runs
            )
        return (
            max(self._seconds[key] * micro_batches, fixed.communicating) + fixed.updating
        ) * _LESS

    # --- shared by candidates --------------------------------------------------------------------

    def program(self, candidate: Candidate) -> Program:
        """Return the program of a candidate's remat set."""
        key = _, counts = self._key(candidate)
        if key not in self._programs:
            spliced_program = None if self.exact else self._spliced(candidate, counts)
            self._programs[key] = (
                spliced_program
                if spliced_program is not None
                else self._traced(candidate.profile, counts)
            )
        return self._programs[key]

    def _key(self, candidate: Candidate) -> tuple[int, tuple[int, ...]]:
        return candidate.profile, tuple(choice.remat for choice in candidate.choices)

    def _spliced(self, candidate: Candidate, counts: tuple[int, ...]) -> Program | None:
        """Return the program from that of another number of units, of the largest class."""
        largest = max(
            range(len(counts)), key=lambda i: (self.classes[i].repeated, len(self.classes[i].names))
        )
        names = self.classes[largest].names
        middle = len(names) // 2
        if not self.classes[largest].repeated or counts[largest] == middle:
            return None
        other_counts = (*counts[:largest], middle, *counts[largest + 1 :])
        # Why first: it costs nothing if the counts are too near to an end.
        if min(middle, counts[largest], len(names) - middle, len(names) - counts[largest]) <= 3:
            return None
        return splice(self._traced(candidate.profile, other_counts), names, middle, counts[largest])

    def _traced(self, number: int, counts: tuple[int, ...]) -> Program:
        _, profile = self.profiles[number]
        names = [
            name for units, k in zip(self.classes, counts, strict=True) for name in units.again[:k]
        ]
        return profile.program(self._single(number), remat=names)

    def _clock(self, mesh: tuple[int, int]) -> HardwareClock:
        if mesh not in self._clocks:
            self._clocks[mesh] = HardwareClock(
                self.hardware, {"replicate": mesh[0], "shard": mesh[1]}
            )
        return self._clocks[mesh]

    def _single(self, number: int) -> Plan:
        """Return the plan for one rank."""
        if number not in self._singles:
            profile = self.profiles[number][1]
            self._singles[number] = make_plan(
                profile.forms, 1, ties=profile.ties, precision=profile.precision, **self.make
            )
        return self._singles[number]

    def _base(self, number: int, mesh: tuple[int, int], mode: _Mode) -> _Base:
        """Return the plan in which all units have the same options."""
        key = (number, mesh, mode)
        if key not in self._bases:
            self._bases[key] = self._measured(
                number, _on_mesh(self._single(number), mesh, mode), mesh
            )
        return self._bases[key]

    def _measured(self, number: int, plan: Plan, mesh: tuple[int, int]) -> _Base:
        states = 0 if self.optimizer is None else self.optimizer.states_before
        resident: dict[str, int] = {}
        gathered: dict[str, int] = {}
        updated: dict[str, int] = {}
        seconds = {name: [0.0, 0.0, 0.0] for name in plan.units}
        known_sizes: dict[Any, tuple[int, int, int]] = {}
        for unit in plan.unit_list:
            forms = tuple(
                (
                    buffer.key,
                    buffer.numel,
                    buffer.dtype,
                    buffer.trainable,
                    buffer.shards,
                    buffer.local,
                )
                for buffer in unit.buffers
            )
            if (key := (forms, unit.precision, unit.reshard_after_forward)) not in known_sizes:
                sizes = sizes_of(unit, accelerator=self.runtime.accelerator)
                device = not sizes.offload
                held = (sizes.shard + states * sizes.trainable_shard) if device else 0
                trained = any(buffer.trainable for buffer in sizes.buffers)
                stays = sum(buffer.gathered for buffer in sizes.buffers) if trained else 0
                known_sizes[key] = held, stays, sizes.trainable_shard if device else 0
            resident[unit.name], gathered[unit.name], updated[unit.name] = known_sizes[key]
        program = self._traced(number, (0,) * len(self.classes))
        units, clock = plan.units, self._clock(mesh)
        for event in predict_events(
            plan, [name for name in program.order if name in units], not_saved=program.not_saved
        ):
            lane = int(event.kind != "all_gather")
            if self.runtime.replicates_apart and event.kind == "all_reduce":
                lane = 2
            seconds[event.unit or ""][lane] += clock.collective(event)[0]
        return _Base(
            plan,
            resident,
            gathered,
            updated,
            {name: (a, b, c) for name, (a, b, c) in seconds.items()},
        )


def _on_mesh(plan: Plan, mesh: tuple[int, int], mode: _Mode) -> Plan:
    """Return the plan that ``make_plan`` makes for another mesh, in a tenth of its time."""
    shards = 1 if mode.strategy == "no_shard" else mesh[1]
    units = []
    for unit in plan.unit_list:
        buffers = tuple(
            dataclasses.replace(buffer, shards=1 if "shard" in buffer.local else shards)
            for buffer in unit.buffers
        )
        freed = (
            (mode.slices or True) if mode.strategy == "full_shard" and unit.name != "" else False
        )
        units.append(
            dataclasses.replace(
                unit, strategy=mode.strategy, reshard_after_forward=freed, mesh_shape=mesh, buffers=buffers,
                offload=mode.offload,
            )
        )  # fmt: skip
    return dataclasses.replace(plan, mesh_shape=mesh, unit_list=tuple(units))
