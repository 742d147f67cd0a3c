"""``simulate_step``: walk through one training step, and count its memory and its time.

The program gives the model's computations and their memory. The plan's predicted step gives the
collectives and where they start. The rules below give the buffers that the runtime holds:

- A gather takes its buffer when it starts, and frees the cast of the shard when it's waited for.
- Forward waits for a unit, starts the gathers ahead, computes, and frees the unit if the plan
  reshards it. Backward does the same.
- A unit without gradients is freed when backward leaves it.
- When the gradients of a unit are complete, the runtime frees the gathered unit, joins the
  gradients into one flat buffer, and starts to reduce it. A CPU waits for the reduction before
  first, another device afterwards.
- The optimizer runs when all gradients are reduced.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from funcshard.estimate.trace import Profile, Program, Run
from funcshard.estimate.walk.lanes import HardwareClock, Lanes
from funcshard.estimate.walk.ledger import Ledger
from funcshard.estimate.walk.runtime import (
    BufferSizes,
    OptimizerMemory,
    Runtime,
    UnitSizes,
    sizes_by_unit,
)
from funcshard.plan import (
    Accumulation,
    Event,
    Plan,
    Reached,
    Schedule,
    buffer_mode,
    predict_step,
    unit_mode,
)


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of ``simulate_step``; see ``Report`` for the fields."""

    schedule: Schedule
    ledger: Ledger
    lanes: Lanes
    events: tuple[Event, ...]
    unit_memory: Mapping[str, Mapping[str, int]]


def simulate_step(
    profile: Profile,
    plan: Plan,
    program: Program,
    clock: HardwareClock,
    *,
    optimizer: OptimizerMemory | None,
    runtime: Runtime,
    schedule: Schedule,
    accumulation: Accumulation,
) -> Simulation:
    """Return the memory and the time of one training step on one rank.

    Arguments:
        profile: the model.
        plan: the plan.
        program: the model as the units of the plan see it.
        clock: the time of everything.
        optimizer: the optimizer's memory; ``None`` runs no optimizer.
        runtime: how ranks communicate.
        schedule: how far to gather ahead.
        accumulation: what the step runs; each micro-batch is one program.
    """
    units, reached_places = plan.units, program.reached
    if "" not in units:
        reached_places = tuple(place for place in reached_places if place.unit in units)
    # Note: the trace knows the order of forward and backward.
    schedule = dataclasses.replace(
        schedule,
        order=tuple(name for name in program.order if name in units),
        backward=tuple(
            (moment, name) for moment, name in program.backward if name in units
        ),
    )
    predicted = predict_step(
        plan,
        schedule,
        not_saved=program.not_saved,
        accumulation=accumulation,
        reached=reached_places,
    )
    lanes = Lanes(clock, runtime)
    step_walk = _Walk(plan, program, lanes, optimizer, runtime, accumulation)
    hold_between_steps(
        step_walk.ledger,
        step_walk.sizes,
        optimizer,
        runtime,
        profile.buffers,
        profile.inputs * accumulation.micro_batches,
    )
    step_walk.run(iter(program.steps * accumulation.micro_batches), predicted)
    step_walk.end()
    return Simulation(
        schedule=schedule,
        ledger=step_walk.ledger,
        lanes=lanes,
        events=tuple(event for event in predicted if isinstance(event, Event)),
        unit_memory=step_walk.unit_memory(),
    )


def hold_between_steps(
    ledger: Ledger,
    unit_sizes: Mapping[str, UnitSizes],
    optimizer: OptimizerMemory | None,
    runtime: Runtime,
    buffers: int,
    inputs: int,
) -> None:
    """Let a ledger begin with what a rank holds between steps."""
    for sizes in unit_sizes.values():
        # Note: what lies on the host takes no device memory, so nothing counts it.
        if not sizes.offload:
            ledger.add("shards", sizes.shard)
            if optimizer is not None:
                ledger.add("optimizer", optimizer.states_before * sizes.trainable_shard)
    ledger.add("buffers", buffers)
    ledger.add("inputs", inputs)
    ledger.add("communicators", runtime.communicators)
    ledger.note(0.0, "start", "")


@dataclass(slots=True)
class _Reduction:
    """A reduction that is running.

    Attributes:
        unit: name of the unit.
        buffer: the buffer that it reduces.
        full: bytes of its send buffer.
        end: when it is over.
    """

    unit: str
    buffer: BufferSizes
    full: int
    end: float


class _Walk:
    def __init__(
        self,
        plan: Plan,
        program: Program,
        lanes: Lanes,
        optimizer: OptimizerMemory | None,
        runtime: Runtime,
        accumulation: Accumulation,
    ) -> None:
        self.lanes, self.ledger = lanes, Ledger()
        self.optimizer, self.runtime, self.accumulation = optimizer, runtime, accumulation
        self.units, self.not_saved = plan.units, program.not_saved
        self.sizes = sizes_by_unit(plan, accelerator=runtime.accelerator)
        # Reductions of one backward, and those still to come in this one, by unit.
        self.reductions = Counter(
            place.unit for place in program.reached if place.what == "reduce"
        )
        self.left = Counter[str]()
        self.backwards = 0  # number of backwards that have begun
        # A unit that is called several times may be held for several calls at a time.
        self.held = Counter[str]()  # bytes of the gathered buffers, by unit
        self.sent = Counter[str]()  # bytes of casts on their way, by unit
        # Bytes of packed leaves once they are decoded, which is when the unit is reached, by unit.
        self.undecoded = Counter[str]()
        # When the gathers of a unit are over, by unit.
        self.ready = defaultdict[str, deque[float]](deque)
        # Whether the rank has waited for the unit that it has reached, or need not.
        self.arrived = True
        self.again = Counter[str]()  # bytes gathered for a forward that runs again, by unit
        self.slices = Counter[str]()  # bytes of slices kept after forward, by unit
        self.summed = set[tuple[str, str]]()  # buffers that later micro-batches add to
        self.running = deque[_Reduction]()
        self.graded = set[tuple[str, str]]()  # buffers with a reduced gradient
        self.held_changes: list[tuple[int, str, int]] = []  # moments before, unit, bytes
        self.copied = (
            0  # bytes of a gathered buffer that was copied out and is not freed yet
        )
        self.lingering: list[int] = []  # bytes of freed units that still count

    # --- the whole step ---------------------------------------------------------------------------

    def run(
        self, steps: Iterator[Run | Reached], predicted: Sequence[Event | Reached]
    ) -> None:
        reached_place = Reached("start", "")
        # Note: predicted events follow the place at which they start. So the walk comes to a place,
        # then issues its collectives, and settles it when the next place follows.
        for step_item in predicted:
            if isinstance(step_item, Event):
                if step_item.kind == "all_gather":
                    self._gather(step_item, reached_place)
                else:
                    self._reduce(step_item)
                continue
            self._settle(reached_place)
            place_kind, unit_name = reached_place = step_item
            if place_kind == "forward":  # the backward of the micro-batch before is over
                self._complete_all()
            self._until(steps, step_item)
            self.arrived = place_kind not in ("forward", "need")
            if place_kind == "backward":
                self.backwards += 1
                self.left = self.reductions.copy()
            elif place_kind == "reduce":
                self._begin_reduce(unit_name)
            elif place_kind == "leave":
                self._leave(unit_name)
            # Note: a unit that isn't cut has no collective, and is cast or copied when it is
            # reached.
            elif place_kind != "again":
                self._hold_uncut(unit_name)
        self._settle(reached_place)
        self._until(steps, None)
        self._complete_all()
        # Note: what backward never needed or left, such as units without gradients, goes at the
        # end.
        while self.held:
            self._drop(next(iter(self.held)))
        self.ledger.free("gathered", sum(self.lingering))
        self._free_copied()
        self.lanes.wait_for_all()
        self.ledger.clear_tape()
        self.note("reduced", "")

    def _until(self, steps: Iterator[Run | Reached], target: Reached | None) -> None:
        ledger, lanes = self.ledger, self.lanes
        for step in steps:
            if isinstance(step, Run):
                begin = lanes.now
                lanes.compute(step)
                ledger.run(step, begin, lanes.now)
            elif step == target:
                return
            elif step.what == "free":
                self._change(step.unit, -self.again.pop(step.unit, 0))
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
        is_ahead = (
            reached.unit != name
            or reached.what == "backward"
            or bool(self.ready[reached.unit])
        )
        # Note: a CPU waits for the unit before it gathers ahead; a GPU's host issues both first.
        if is_ahead and not self.runtime.accelerator and not self.arrived:
            self._await_unit(reached)
        sizes = self.sizes[name]
        self._hold_uncut(name)
        buffer = sizes.buffers[event.buffer]
        if buffer.decoding:
            self.undecoded[name] += buffer.gathered
        else:
            self._hold(name, buffer.gathered)
        # Note: a slice that neighbours hold is gathered in the dtype that it has.
        if buffer.decoding or (self.runtime.sent_lives and not self.slices.get(name)):
            self.ledger.add("gathered", buffer.sent)
            self.sent[name] += buffer.sent
        if sizes.offload:
            self.lanes.copy("gather", buffer.shard)
        end = self.lanes.communicate("gather", event)
        # Note: the rank waits for all buffers of a unit at once.
        if event.buffer == sizes.last_cut:
            self.ready[name].append(end)
        self.note("gather", name)

    def _gather_again(self, event: Event, name: str) -> None:
        """Gather a unit for a forward that a checkpoint runs again, and wait at once."""
        sizes = self.sizes[name]
        buffer = sizes.buffers[event.buffer]
        gathered_bytes = buffer.gathered + (0 if name in self.again else sizes.uncut)
        sent_bytes = buffer.sent * (self.runtime.sent_lives or buffer.decoding > 0)
        sent_bytes += buffer.decoding
        self.again[name] += gathered_bytes
        self._change(name, gathered_bytes)
        self.ledger.add("gathered", sent_bytes)
        if sizes.offload:
            self.lanes.copy("gather", buffer.shard)
        end = self.lanes.communicate("gather", event)
        self.note("gather", name)
        self.lanes.wait(end)
        self.ledger.free("gathered", sent_bytes)

    def _hold_uncut(self, name: str) -> None:
        """Hold the casts of buffers that aren't gathered."""
        uncut_bytes = self.sizes[name].uncut
        if uncut_bytes and name not in self.held:
            self._hold(name, uncut_bytes)
            self._decode(name)

    def _decode(self, name: str) -> None:
        """Count what decoding packed leaves takes beside its result."""
        decoding_bytes = self.sizes[name].decoding
        if decoding_bytes:
            self.ledger.add("gathered", decoding_bytes)
            self.note("gather", name)
            self.ledger.free("gathered", decoding_bytes)

    def _hold(self, name: str, size: int) -> None:
        self.held[name] += size
        self._change(name, size)

    def _change(self, name: str, size: int) -> None:
        self.ledger.add("gathered", size)
        self.held_changes.append((len(self.ledger.moments), name, size))

    def _await_unit(self, reached: Reached) -> None:
        """Wait for the gather of the unit that the rank has reached."""
        self.arrived, unit_name = True, reached.unit
        ready_times = self.ready[unit_name]
        if ready_times:
            self.lanes.wait(ready_times[0])
        if unit_name not in self.undecoded:
            self._free_sent(unit_name)
        if ready_times:
            if self.runtime.copies_out and self.held[unit_name]:
                self._copy_out(reached)
            ready_times.popleft()

    def _free_sent(self, name: str) -> None:
        if name in self.sent:
            self.ledger.free("gathered", _take(self.sent, name, self.sizes[name].sent))

    def _copy_out(self, reached: Reached) -> None:
        """Copy a gathered buffer into the parameters' own tensors."""
        self._free_copied()
        self.copied = self.held[reached.unit]
        self.ledger.add("gathered", self.copied)
        self.note("copy out", reached.unit)
        # Note: in forward, FSDP2 keeps the buffer until the next unit is gathered.
        if reached.what != "forward":
            self._free_copied()

    def _free_copied(self) -> None:
        self.ledger.free("gathered", self.copied)
        self.copied = 0

    def _settle(self, reached: Reached) -> None:
        if not self.arrived:
            self._await_unit(reached)
        # Note: packed leaves are decoded when the next gathers have started.
        if reached.unit in self.undecoded:
            decoded_bytes = self.sizes[reached.unit].decoded
            self._hold(reached.unit, _take(self.undecoded, reached.unit, decoded_bytes))
            self._decode(reached.unit)
            self._free_sent(reached.unit)
        # Note: one reduction may run beside the backward of the next unit.
        if reached.what == "reduce":
            while len(self.running) > 1:
                self._complete(self.running.popleft())

    def _return(self, name: str) -> None:
        unit_sizes = self.sizes.get(name)
        if unit_sizes is None:
            return
        is_spared = name in self.not_saved
        if not unit_sizes.stays or (is_spared and not unit_sizes.reduced):
            if unit_sizes.slice and not is_spared:
                self.ledger.add("gathered", unit_sizes.slice)
                self.slices[name] += unit_sizes.slice
                self.note("forward", name)
            self._drop(name)

    def _leave(self, name: str) -> None:
        unit_sizes = self.sizes[name]
        # Note: the call itself holds the root, and a slice that is kept, until backward has ended.
        kept_by_call = unit_sizes.stays if name else unit_sizes.slice
        if not kept_by_call:
            if name in self.held:
                self._drop(name)
            self.ledger.free("gathered", _take(self.slices, name, unit_sizes.slice))

    def _drop(self, name: str) -> None:
        held_bytes = _take(self.held, name, self.sizes[name].gathered)
        self.held_changes.append((len(self.ledger.moments), name, -held_bytes))
        if name in self.sent and name not in self.held:
            self.ledger.free("gathered", self.sent.pop(name))
        # Note: the allocator counts a freed buffer until the stream that used it has passed.
        if not self.runtime.lingering:
            self.ledger.free("gathered", held_bytes)
            return
        self.lingering.append(held_bytes)
        while len(self.lingering) > self.runtime.lingering:
            self.ledger.free("gathered", self.lingering.pop(0))

    # --- reductions -------------------------------------------------------------------------------

    def _begin_reduce(self, name: str) -> None:
        """Join the gradients of a unit, for the reduction whose events follow."""
        unit_sizes = self.sizes[name]
        self.left[name] -= 1
        more_coming = self.left[name] > 0
        is_last = self.backwards == self.accumulation.micro_batches
        # Note: a kept unit serves all its calls, so only the last reduction of a backward frees it.
        if not (unit_sizes.stays and more_coming) and (
            self.units[name].reshard_after_backward or is_last
        ):
            self._drop(name)
        if name in self.slices:
            self.ledger.free("gathered", _take(self.slices, name, unit_sizes.slice))
        for buffer in unit_sizes.reduced:
            reduce_mode = unit_mode(self.accumulation.reduce, name)
            if buffer_mode(reduce_mode, cut=buffer.cut, repeated=buffer.repeated) != "once":
                self._start(name, buffer, joined=False)
                continue
            # Note: gradients are joined for later micro-batches.
            self.ledger.add("reduction", buffer.full + buffer.cast_grads)
            self.note("join", name)
            if (
                name,
                buffer.key,
            ) in self.summed:  # it is added to that of the micro-batch before
                self.ledger.free("reduction", buffer.full)
            self.summed.add((name, buffer.key))
            if is_last and not more_coming:
                self.summed.discard((name, buffer.key))
                self._start(name, buffer, joined=True)
            self.ledger.free("reduction", buffer.cast_grads)

    def _start(self, name: str, buffer: BufferSizes, *, joined: bool) -> None:
        """Take the buffers of a reduction, whose time follows with its events.

        ``joined``: the gradients are in a buffer already.
        """
        # Note: the send buffer of the reduction before is freed before this one takes its own.
        if (self.runtime.frees_first or not self.runtime.accelerator) and self.running:
            last_reduction = self.running[-1]
            self.lanes.wait(last_reduction.end)
            self.ledger.free("reduction", last_reduction.full)
            last_reduction.full = 0
        sent_bytes = buffer.full * buffer.cut
        taken_bytes, cast_bytes = buffer.reduced + sent_bytes, buffer.full_before_cast
        # Note: the joined buffer is there already, and its cast has happened.
        if joined:
            taken_bytes, cast_bytes = taken_bytes - buffer.full, 0
        self.ledger.add("reduction", taken_bytes + cast_bytes)
        self.note("reduce", name)
        self.ledger.free("reduction", cast_bytes)
        self.running.append(_Reduction(name, buffer, sent_bytes, self.lanes.now))

    def _reduce(self, event: Event) -> None:
        end = self.lanes.communicate("reduce", event)
        for reduction in self.running:
            if (reduction.unit, reduction.buffer.key) == (event.unit, event.buffer):
                reduction.end = max(reduction.end, end)

    def _complete_all(self) -> None:
        while self.running:
            self._complete(self.running.popleft())

    def _complete(self, reduction: _Reduction) -> None:
        """Wait for a reduction, and keep the rank's part."""
        self.lanes.wait(reduction.end)
        self.ledger.free("reduction", reduction.full)
        name, buffer = reduction.unit, reduction.buffer
        on_host = self.sizes[name].offload
        kept_bytes = 0 if on_host else buffer.kept
        # Why together on the device: without a cast the gradient is the reduced buffer itself.
        self.ledger.add("gradient shards", kept_bytes)
        if on_host or buffer.kept != buffer.reduced:
            self.note("reduced", name)
        self.ledger.free("reduction", buffer.reduced)
        if on_host:
            self.lanes.copy("reduce", buffer.reduced)
        if (
            name,
            buffer.key,
        ) in self.graded:  # it is added to that of the micro-batch before
            self.note("accumulate", name)
            self.ledger.free("gradient shards", kept_bytes)
        self.graded.add((name, buffer.key))

    # --- the end of the step ----------------------------------------------------------------------

    def end(self) -> None:
        kept_bytes = sum(
            self.sizes[name].buffers[key].kept
            for name, key in self.graded
            if not self.sizes[name].offload
        )
        if self.optimizer is not None:
            self._update(self.optimizer, kept_bytes)
        self.ledger.free("gradient shards", kept_bytes)
        self.note("end", "")

    def _update(self, optimizer: OptimizerMemory, kept: int) -> None:
        ledger, states = self.ledger, optimizer.states
        if optimizer.clip:
            ledger.add("gradient shards", kept)  # clipping makes a second tree of gradients
            self.note("clip", "")
            ledger.free("gradient shards", kept)
            self.note("clip", "")
        # Note: the optimizer updates shards on the host too, but in the host's memory.
        shard_sizes = [
            buffer.shard
            for unit in self.sizes.values()
            if not unit.offload
            for buffer in unit.buffers.values()
            if buffer.trainable and buffer.shard
        ]
        if optimizer.first_step:
            ledger.add("optimizer", states * sum(shard_sizes))
        copied_bytes = 0 if optimizer.donate else (1 + states) * sum(shard_sizes)
        temporary_bytes = self._temporaries(optimizer.temporaries, shard_sizes)
        ledger.add("optimizer", copied_bytes)
        ledger.add("temporaries", temporary_bytes)
        self.note("optimizer", "")
        # Why three: the update reads the gradient, and reads and writes the shard.
        self.lanes.update(sum(shard_sizes) * (3 + 2 * states))
        ledger.free("temporaries", temporary_bytes)
        ledger.free("optimizer", copied_bytes)

    def _temporaries(self, temporaries: str, shards: Sequence[int]) -> int:
        if temporaries == "none" or not shards:
            return 0
        # Note: on the CPU torch loops over the tensors, also for "foreach".
        if temporaries == "all" or (temporaries == "foreach" and self.runtime.accelerator):
            return sum(shards)
        # Why three: the result for the shard before lives while the next one takes two tensors.
        return max(
            before + 2 * size for before, size in zip([0, *shards], shards, strict=False)
        )

    # --- moments ----------------------------------------------------------------------------------

    def note(self, what: str, unit: str) -> None:
        self.ledger.note(self.lanes.now, what, unit)

    def unit_memory(self) -> dict[str, dict[str, int]]:
        """Return the bytes at the peak by unit and category."""
        gathered_bytes = Counter[str]()
        for position, name, change in self.held_changes:
            if position > self.ledger.highest:
                break
            gathered_bytes[name] += change
        bytes_by_unit: dict[str, dict[str, int]] = {}
        for name, sizes in self.sizes.items():
            unit_bytes = bytes_by_unit[name] = {}
            if not sizes.offload:
                states = 0 if self.optimizer is None else self.optimizer.states
                unit_bytes["shards"] = sizes.shard
                unit_bytes["optimizer"] = states * sizes.trainable_shard
            if gathered_bytes[name]:
                unit_bytes["gathered"] = gathered_bytes[name]
        return bytes_by_unit


def _take(sizes: Counter[str], name: str, most: int) -> int:
    """Take bytes off a unit's, and return how many."""
    taken_bytes = sizes.pop(name, 0)
    if taken_bytes > most:
        sizes[name] = taken_bytes - most
    return min(taken_bytes, most)
