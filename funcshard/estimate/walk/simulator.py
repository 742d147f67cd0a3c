"""``simulate_step``: walk through one training step, and count its memory and its time.

The simulator follows three things at once. The program gives the computations of the model and
their memory. The plan's predicted step gives the collectives and the places at which they start.
The rules below give the buffers that the runtime holds, and when:

- A gather takes its buffer when it starts, and frees the cast of the shard when it is waited for.
- Forward waits for a unit, starts the gathers ahead, computes, and frees the unit if the plan
  reshards it. Backward does the same.
- A unit without gradients is freed when backward leaves it.
- When the gradients of a unit are complete, the runtime frees the gathered unit, joins the
  gradients into one flat buffer, and starts to reduce it. On a CPU it first waits for the reduction
  before; on another device it waits for that one afterwards.
- The optimizer runs when all gradients are reduced.

Compute and communication have their own clocks. A collective starts when its lane is free and
the rank has reached its start; a computation waits for the collectives that it needs.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from funcshard.estimate.trace import Mark, Program, Run
from funcshard.estimate.walk.lanes import Clock, Lanes
from funcshard.estimate.walk.ledger import Ledger
from funcshard.estimate.walk.optimizing import optimize
from funcshard.estimate.walk.runtime import OptimizerMemory, Runtime
from funcshard.estimate.walk.sizes import BufferSizes, UnitSizes, sizes_of
from funcshard.estimate.walk.step import Span
from funcshard.plan import (
    Event,
    Plan,
    Reached,
    Reduce,
    UnitPlan,
    buffer_mode,
    representatives,
    unit_mode,
)


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of ``simulate_step``; see ``Report`` for the fields."""

    ledger: Ledger
    spans: tuple[Span, ...]
    events: tuple[Event, ...]
    step_time: float
    exposed: float
    unit_memory: Mapping[str, Mapping[str, int]]
    peak: int


def simulate_step(
    plan: Plan,
    program: Program,
    predicted: Sequence[Event | Reached],
    clock: Clock,
    *,
    optimizer: OptimizerMemory | None = None,
    runtime: Runtime | None = None,
    micro_batches: int = 1,
    reduce: Reduce = "each",
    buffers: int = 0,
    inputs: int = 0,
) -> Simulation:
    """Return the memory and the time of one training step on one rank.

    Arguments:
        plan: the plan.
        program: the computations of the model.
        predicted: the collectives of the step and their places, from ``predict_step``.
        clock: the time of everything.
        optimizer: the optimizer's memory; ``None`` runs no optimizer.
        runtime: how ranks communicate.
        micro_batches: number of micro-batches; the program is that of one of them.
        reduce: when gradients are reduced, as in ``predict_step``.
        buffers: bytes of the model's buffers.
        inputs: bytes of the batch.
    """
    runtime, lanes = runtime or Runtime(), Lanes(clock, runtime or Runtime())
    walk = _Walk(
        plan,
        lanes,
        optimizer,
        runtime,
        micro_batches,
        reduce,
        program.not_saved,
        plan.units,
    )
    walk.start(buffers, inputs)
    walk.reductions = Counter(
        unit for place_kind, unit in program.reached if place_kind == "reduce"
    )
    steps = itertools.chain.from_iterable(itertools.repeat(program.steps, micro_batches))
    walk.run(steps, predicted)
    optimize(walk)
    events, ledger = (
        tuple(step_item for step_item in predicted if isinstance(step_item, Event)),
        walk.ledger,
    )
    return Simulation(
        ledger,
        tuple(lanes.spans),
        events,
        lanes.now,
        lanes.exposed,
        walk.unit_memory(),
        ledger.peak,
    )


@dataclass(slots=True)
class _Reduction:
    """A reduction that is running.

    Attributes:
        unit: name of the unit.
        buffer: the buffer that it reduces.
        full: bytes of its send buffer, which is freed when the reduction is waited for.
        end: when it is over.
    """

    unit: str
    buffer: BufferSizes
    full: int
    end: float


@dataclass(slots=True, eq=False)
class _Walk:
    plan: Plan
    lanes: Lanes
    optimizer: OptimizerMemory | None
    runtime: Runtime
    micro_batches: int
    reduce: Reduce
    not_saved: frozenset[str]
    units: Mapping[str, UnitPlan]
    ledger: Ledger = field(default_factory=Ledger)
    backwards: int = 0  # number of backwards that have begun
    sizes: dict[str, UnitSizes] = field(default_factory=dict)
    # A unit that is called several times may be held for several calls at a time.
    held: dict[str, int] = field(default_factory=dict)  # bytes of the gathered buffers, by unit
    sent: dict[str, int] = field(default_factory=dict)  # bytes of casts on their way, by unit
    # When the gathers of a unit are over.
    ready: dict[str, list[float]] = field(default_factory=dict)
    # Whether the rank has waited for the unit that it has reached, or need not.
    arrived: bool = True
    # Reductions still to come in this backward, by unit.
    left: Counter[str] = field(default_factory=Counter)
    reductions: Counter[str] = field(default_factory=Counter)  # reductions of one backward, by unit
    # Bytes gathered for a forward that runs again, by unit.
    again: dict[str, int] = field(default_factory=dict)
    # Bytes of slices kept after forward, by unit.
    slices: dict[str, int] = field(default_factory=dict)
    # Buffers that later micro-batches add to.
    summed: set[tuple[str, str]] = field(default_factory=set)
    running: deque[_Reduction] = field(default_factory=deque)
    graded: set[tuple[str, str]] = field(default_factory=set)  # buffers with a reduced gradient
    # Moments before, unit, bytes.
    held_changes: list[tuple[int, str, int]] = field(default_factory=list)
    copied: int = 0  # bytes of a gathered buffer that was copied out and is not freed yet
    lingering: list[int] = field(default_factory=list)  # bytes of freed units that still count

    # --- the whole step ---------------------------------------------------------------------------

    def start(self, buffers: int, inputs: int) -> None:
        """Hold what a rank holds between steps."""
        known_sizes: dict[str, UnitSizes] = {}
        for name, unit in representatives(self.plan.unit_list).items():
            if unit.name not in known_sizes:
                known_sizes[unit.name] = sizes_of(unit, accelerator=self.runtime.accelerator)
            self.sizes[name] = known_sizes[unit.name]
        states = 0 if self.optimizer is None else self.optimizer.states_before
        for sizes in self.sizes.values():
            self.ledger.add("shards", sizes.shard, host=sizes.offload)
            self.ledger.add("optimizer", states * sizes.trainable_shard, host=sizes.offload)
        self.ledger.add("buffers", buffers)
        self.ledger.add("inputs", inputs)
        self.ledger.add("communicators", self.runtime.communicators)
        self.note("start", "")

    def run(self, steps: Iterator[Run | Mark], predicted: Sequence[Event | Reached]) -> None:
        """Walk through the program and the predicted collectives side by side."""
        reached = Reached("start", "")
        for step_item in predicted:
            if isinstance(step_item, Event):
                if step_item.kind == "all_gather":
                    self._gather(step_item, reached)
                else:
                    self._reduce(step_item)
                continue
            self._settle(reached)
            place_kind, unit = reached = step_item
            if (
                place_kind == "forward" and self.running
            ):  # the backward of the micro-batch before is over
                self._complete_all()
            self._until(steps, step_item)
            self.arrived = place_kind not in ("forward", "need")
            if place_kind == "backward":
                self.backwards += 1
                self.left = self.reductions.copy()
            elif place_kind == "reduce":
                self._begin_reduce(unit)
            elif place_kind == "leave":
                self._leave(unit)
            elif place_kind != "again":
                self._hold_uncut(unit)
        self._settle(reached)
        self._until(steps, None)
        self._complete_all()
        while self.held:
            self._drop(next(iter(self.held)))
        self.ledger.free("gathered", sum(self.lingering) + self.copied)
        self.lingering, self.copied = [], 0
        self.lanes.wait_for_all()
        self.ledger.clear_tape()
        self.note("reduced", "")

    def _until(self, steps: Iterator[Run | Mark], target: Reached | None) -> None:
        """Run the program up to a mark, or to its end."""
        ledger, lanes = self.ledger, self.lanes
        for step in steps:
            if isinstance(step, Run):
                begin = lanes.now
                lanes.compute(step)
                ledger.run(step, begin, lanes.now)
            elif step == target:
                return
            elif step.what == "free":
                size = self.again.pop(step.unit, 0)
                ledger.free("gathered", size)
                self.held_changes.append((len(ledger.moments), step.unit, -size))
            elif step.what == "return":
                if not step.unit:
                    self._free_copied()
                self._return(step.unit)
        assert target is None, f"the program has no {target} here"

    # --- gathers ----------------------------------------------------------------------------------

    def _gather(self, event: Event, reached: Reached) -> None:
        assert event.unit is not None, "an all-gather of the step belongs to units"
        if reached.what == "again":
            self._gather_again(event, event.unit)
            return
        name = event.unit
        # Why ready: the unit may be gathered for its next call, while it is there for this one.
        ahead = (
            reached.unit != name or reached.what == "backward" or bool(self.ready.get(reached.unit))
        )
        if ahead and not self.runtime.accelerator and not self.arrived:
            self._await_unit(reached)
        sizes = self.sizes[name]
        if sizes.uncut:
            self._hold_uncut(name)
        buffer = sizes.by_key[event.buffer]
        self._hold(name, buffer.gathered)
        if buffer.sent and self.runtime.sent_lives and not self.slices.get(name):
            self.ledger.add("gathered", buffer.sent)
            self.sent[name] = self.sent.get(name, 0) + buffer.sent
        if sizes.offload:
            self.lanes.copy("gather", buffer.shard)
        end = self.lanes.communicate("gather", event)
        if event.buffer == sizes.last_cut:
            self.ready.setdefault(name, []).append(end)
        self.note("gather", name)

    def _gather_again(self, event: Event, name: str) -> None:
        """Gather a unit for a forward that a checkpoint runs again, and wait for it at once."""
        sizes = self.sizes[name]
        buffer = sizes.by_key[event.buffer]
        size = buffer.gathered + (0 if name in self.again else sizes.uncut)
        sent = buffer.sent if self.runtime.sent_lives else 0
        self.again[name] = self.again.get(name, 0) + size
        self.held_changes.append((len(self.ledger.moments), name, size))
        self.ledger.add("gathered", size + sent)
        if sizes.offload:
            self.lanes.copy("gather", buffer.shard)
        end = self.lanes.communicate("gather", event)
        self.note("gather", name)
        self.lanes.wait(end)
        self.ledger.free("gathered", sent)

    def _hold_uncut(self, name: str) -> None:
        """Hold the casts of buffers that are not gathered."""
        size = self.sizes[name].uncut
        if size and name not in self.held:
            self._hold(name, size)

    def _hold(self, name: str, size: int) -> None:
        """Take a gathered buffer of a unit."""
        self.ledger.add("gathered", size)
        self.held[name] = self.held.get(name, 0) + size
        self.held_changes.append((len(self.ledger.moments), name, size))

    def _await_unit(self, reached: Reached) -> None:
        """Wait for the gather of the unit that the rank has reached."""
        self.arrived, unit = True, reached.unit
        ready = self.ready.get(unit)
        if ready:
            self.lanes.wait(ready[0])
        if unit in self.sent:
            self.ledger.free("gathered", _take(self.sent, unit, self.sizes[unit].sent))
        if ready:
            if self.runtime.copies_out:
                self._copy_out(reached)
            del ready[0]

    def _copy_out(self, reached: Reached) -> None:
        """Copy a gathered buffer into the parameters' own tensors."""
        size = self.held.get(reached.unit, 0)
        if not size:
            return
        self.ledger.free("gathered", self.copied)
        self.copied = size
        self.ledger.add("gathered", size)
        self.note("copy out", reached.unit)
        if reached.what != "forward":
            self._free_copied()

    def _free_copied(self) -> None:
        self.ledger.free("gathered", self.copied)
        self.copied = 0

    def _settle(self, reached: Reached) -> None:
        """Do what follows the collectives that start at a place."""
        if not self.arrived:
            self._await_unit(reached)
        if reached.what == "reduce":
            while len(self.running) > 1:
                self._complete(self.running.popleft())

    def _return(self, name: str) -> None:
        sizes = self.sizes.get(name)
        if sizes is None:
            return
        spared = name in self.not_saved
        if not sizes.stays or (spared and not any(buffer.trainable for buffer in sizes.buffers)):
            if sizes.slice and not spared:
                self.ledger.add("gathered", sizes.slice)
                self.slices[name] = self.slices.get(name, 0) + sizes.slice
                self.note("forward", name)
            self._drop(name)

    def _leave(self, name: str) -> None:
        """Free a unit without gradients, unless the call holds it until backward ends."""
        sizes = self.sizes[name]
        if not (sizes.stays if name else sizes.slice):
            if name in self.held:
                self._drop(name)
            self.ledger.free("gathered", _take(self.slices, name, sizes.slice))

    def _drop(self, name: str) -> None:
        """Free the gathered buffers of one call of a unit."""
        held = _take(self.held, name, self.sizes[name].gathered)
        self.held_changes.append((len(self.ledger.moments), name, -held))
        if name in self.sent and name not in self.held:
            self.ledger.free("gathered", self.sent.pop(name))
        if not self.runtime.lingering:
            self.ledger.free("gathered", held)
            return
        self.lingering.append(held)
        while len(self.lingering) > self.runtime.lingering:
            self.ledger.free("gathered", self.lingering.pop(0))

    # --- reductions -------------------------------------------------------------------------------

    def _begin_reduce(self, name: str) -> None:
        """Join the gradients of a unit, for the reduction whose events follow."""
        sizes = self.sizes[name]
        self.left[name] -= 1
        more_coming, last = self.left[name] > 0, self.backwards == self.micro_batches
        if not (sizes.stays and more_coming) and (self.units[name].reshard_after_backward or last):
            self._drop(name)
        if name in self.slices:
            self.ledger.free("gathered", _take(self.slices, name, sizes.slice))
        for buffer in sizes.reduced:
            if self._mode(name, buffer) != "once":
                self._start(name, buffer, joined=False)
                continue
            cast = self._join(name, buffer)
            if last and not more_coming:
                self.summed.discard((name, buffer.key))
                self._start(name, buffer, joined=True)
            self.ledger.free("reduction", cast)

    def _mode(self, name: str, buffer: BufferSizes) -> str:
        mode = unit_mode(self.reduce, name)
        return (
            buffer_mode(mode, cut=buffer.cut, repeated=buffer.repeated)
            if mode == "shard_each"
            else mode
        )

    def _join(self, name: str, buffer: BufferSizes) -> int:
        """Join the gradients of a unit into a buffer that waits for those of later micro-batches.

        Returns:
            The bytes of the buffer before its cast, which lives a little longer.
        """
        cast = buffer.grads if buffer.casts_grads else 0
        self.ledger.add("reduction", buffer.full + cast)
        self.note("join", name)
        if (name, buffer.key) in self.summed:  # it is added to that of the micro-batch before
            self.ledger.free("reduction", buffer.full)
        else:
            self.summed.add((name, buffer.key))
        return cast

    def _start(self, name: str, buffer: BufferSizes, *, joined: bool) -> None:
        """Take the buffers of a reduction; its time follows with its events."""
        if (self.runtime.frees_first or not self.runtime.accelerator) and self.running:
            last = self.running[-1]
            self.lanes.wait(last.end)
            self.ledger.free("reduction", last.full)
            last.full = 0
        sends = self.runtime.send_buffers or joined
        full = buffer.full if buffer.cut and sends else 0
        taken, cast = buffer.reduced + full, buffer.full_before_cast
        if joined:  # the buffer is sent, or reduced in place, itself
            taken, cast = taken - buffer.full, 0
        self.ledger.add("reduction", taken + cast)
        self.note("reduce", name)
        self.ledger.free("reduction", cast)
        self.running.append(_Reduction(name, buffer, full, self.lanes.now))

    def _reduce(self, event: Event) -> None:
        end = self.lanes.communicate("reduce", event)
        for reduction in self.running:
            if (reduction.unit, reduction.buffer.key) == (event.unit, event.buffer):
                reduction.end = max(reduction.end, end)

    def _complete_all(self) -> None:
        while self.running:
            self._complete(self.running.popleft())

    def _complete(self, reduction: _Reduction) -> None:
        """Wait for a reduction, and keep the rank's part of the gradients."""
        self.lanes.wait(reduction.end)
        self.ledger.free("reduction", reduction.full)
        name, buffer = reduction.unit, reduction.buffer
        host = self.sizes[name].offload
        if host or buffer.kept != buffer.reduced:
            self.ledger.add("gradient shards", buffer.kept, host=host)
            self.note("reduced", name)
            self.ledger.free("reduction", buffer.reduced)
        else:
            self.ledger.free("reduction", buffer.reduced)
            self.ledger.add("gradient shards", buffer.kept, host=host)
        if host:
            self.lanes.copy("reduce", buffer.reduced)
        # It is added to the gradient of the micro-batch before.
        if (name, buffer.key) in self.graded:
            self.note("accumulate", name)
            self.ledger.free("gradient shards", buffer.kept, host=host)
        self.graded.add((name, buffer.key))

    # --- moments ----------------------------------------------------------------------------------

    def note(self, what: str, unit: str) -> None:
        """Keep the memory as it is now as a moment."""
        self.ledger.note(self.lanes.now, what, unit)

    def unit_memory(self) -> dict[str, dict[str, int]]:
        """Return the bytes at the peak by unit and category, in categories that belong to units."""
        states = self.optimizer.states if self.optimizer is not None else 0
        held: dict[str, int] = {}
        for position, name, change in self.held_changes:
            if position > self.ledger.highest:
                break
            held[name] = held.get(name, 0) + change
        bytes_by_unit = {}
        for name, sizes in self.sizes.items():
            if not sizes.offload:
                bytes_by_unit[name] = {
                    "shards": sizes.shard,
                    "optimizer": states * sizes.trainable_shard,
                }
            else:
                bytes_by_unit[name] = {}
            if held.get(name):
                bytes_by_unit[name]["gathered"] = held[name]
        return bytes_by_unit


def _take(sizes: dict[str, int], name: str, most: int) -> int:
    """Take bytes off a unit's, and return how many; the unit is left out when it has none."""
    taken_bytes = sizes.pop(name, 0)
    if taken_bytes > most:
        sizes[name] = taken_bytes - most
    return min(taken_bytes, most)
