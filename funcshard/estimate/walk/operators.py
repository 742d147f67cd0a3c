"""``simulate_operator``: run an operator such as ``hvp`` without data, and count memory and time.

No schedule changes an operator: each collective is waited for where the operator comes to it. So
the library itself runs here, on fake tensors, as one rank of a job whose other ranks don't exist.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils.tree import tensors_in
from funcshard.comm import DeferredWork, Group, Mesh, Op, concatenate
from funcshard.comm import Work as Waiting
from funcshard.core import gnvp, grad, hvp, jvp, linearize, vjp
from funcshard.estimate.trace import (
    Alloc,
    Counts,
    Frame,
    Free,
    Memory,
    ModelCall,
    Operation,
    Profile,
    Recorder,
    Run,
    Work,
    add_operation,
)
from funcshard.estimate.walk.lanes import HardwareClock, Lanes
from funcshard.estimate.walk.ledger import Ledger
from funcshard.estimate.walk.runtime import OptimizerMemory, Runtime, sizes_by_unit
from funcshard.estimate.walk.simulator import Simulation, hold_between_steps
from funcshard.module import fully_shard
from funcshard.plan import Event, Plan, Schedule, Transform, record_events_apart

Function = Callable[[Any], Any]


def run_operator(
    transform: Transform, out: Function, loss_of: Function, shards: Any, vector: Any
) -> Any:
    """Run an operator on the loss of the outputs, which ``out`` computes from shards."""

    def loss(shards: Any) -> Any:
        return loss_of(out(shards))

    if transform == "gnvp":
        return gnvp(out, loss_of, (shards,), (vector,))
    if transform == "linearize":
        return linearize(loss, shards)[1](vector)
    if transform == "vjp":
        value, pullback = vjp(loss, shards)
        return pullback(torch.ones_like(value))
    if transform == "grad":
        return grad(loss)(shards)
    return (hvp if transform == "hvp" else jvp)(loss, (shards,), (vector,))


def simulate_operator(
    profile: Profile,
    plan: Plan,
    clock: HardwareClock,
    transform: Transform,
    *,
    optimizer: OptimizerMemory | None,
    runtime: Runtime,
    schedule: Schedule,
    remat: Sequence[str],
) -> Simulation:
    """Return the memory and the time of an operator on one rank.

    The arguments are those of ``simulate_step``. The rank holds the optimizer's state, and a vector
    like the shards beside the inputs.
    """
    assert profile.call is not None, "fs.profile has made the profile"
    profile.check(plan)
    sizes = sizes_by_unit(plan, accelerator=runtime.accelerator)
    ledger, lanes = Ledger(), Lanes(clock, runtime)
    input_bytes = profile.inputs + sum(unit.trainable_shard for unit in sizes.values())
    hold_between_steps(ledger, sizes, optimizer, runtime, profile.buffers, input_bytes)
    log, gathered = _record(profile.call, plan, transform, remat)
    events: list[Event] = []
    ends: list[float] = []
    runs: list[Run] = []  # Why kept: lanes know the costs of runs by identity.
    storage_sizes: dict[int, int] = {}
    counts: Counts = {}
    unit_name, live_bytes, highest_bytes = "", 0, 0
    for item in [*log, None]:
        if isinstance(item, Operation):
            add_operation(counts, item)
            continue
        change = 0
        if isinstance(item, Alloc | Free):
            change = item.bytes if isinstance(item, Alloc) else -storage_sizes[item.storage]
            storage_sizes[item.storage] = change
            if item.storage not in gathered:
                live_bytes += change
                highest_bytes = max(highest_bytes, live_bytes)
                continue
        # Note: a run is the computation between two collectives. Its memory is all that the
        # operator holds besides gathered buffers and its arguments.
        work = tuple(Work(dtype, *numbers) for (dtype, _), numbers in counts.items())
        memory = [Memory(size, 0, 0, 0) for size in (highest_bytes, live_bytes)]
        runs.append(Run(unit_name, transform, work, *memory))
        counts, highest_bytes, begin = {}, live_bytes, lanes.now
        lanes.compute(runs[-1])
        ledger.run(runs[-1], begin, lanes.now)
        if isinstance(item, int):
            lanes.wait(ends[item])
        elif isinstance(item, Event):
            assert item.unit is not None, "the log has collectives of units alone"
            unit_name = item.unit
            lane, unit_sizes = (
                "gather" if item.kind == "all_gather" else "reduce",
                sizes[item.unit],
            )
            if unit_sizes.offload:
                lanes.copy(lane, unit_sizes.buffers[item.buffer].shard)
            events.append(item)
            ends.append(lanes.communicate(lane, item))
        elif item is not None:
            ledger.add("gathered", change)
            ledger.note(lanes.now, transform, unit_name)
    lanes.wait_for_all()
    ledger.clear_tape()
    ledger.note(lanes.now, "end", "")
    return Simulation(
        schedule=schedule,
        ledger=ledger,
        lanes=lanes,
        events=tuple(events),
        unit_memory={
            name: {"shards": unit.shard} for name, unit in sizes.items() if not unit.offload
        },
    )


def _record(
    call: ModelCall, plan: Plan, transform: Transform, remat: Sequence[str]
) -> tuple[list[Any], Collection[int]]:
    """Return the events of a recorder and of collectives, and the storages of gathered buffers.

    A number says that the rank waits for a collective: how many began before it.
    """
    recorder = Recorder(Frame("", None, 0))
    log: list[Any] = recorder.log
    gathered: set[int] = set()
    begun_count = itertools.count()

    def begin(op: Op, group: Group) -> Waiting:
        if op.kind == "all_gather_text":
            return DeferredWork(result=[op.data] * group.size)
        sent_data = op.data
        if op.kind == "reduce_scatter" and len(op.data) > 1:
            # Note: parts are copied, and cast to the dtype of the result.
            sent_data = concatenate(
                op.data, group.empty(group.size * op.out.numel(), op.out)
            )
        if op.kind == "all_gather":
            gathered.add(recorder.number(op.out))
        event = events[-1]  # which a collective emits before it begins
        if event.unit is None:  # a collective of the model itself, which has no time here
            return DeferredWork()
        event_index = next(begun_count)
        log.append((event,))
        # Note: a collective that still runs keeps its input.
        held = [op.out, sent_data]

        def finish() -> None:
            held.clear()
            log.append((event_index,))

        return DeferredWork(finish)

    with call.without_data(), torch.enable_grad(), record_events_apart() as events:
        groups = {axis: _AbsentRanks(size, begin) for axis, size in plan.mesh_axes.items()}
        mesh = Mesh(groups, torch.device("cpu"))
        shards, vector = _empty_shards(plan), _empty_shards(plan)
        args, kwargs, buffers, _, loss_of = call.faked()
        sharded = fully_shard(call.apply, plan, mesh, remat=remat)
        for part in recorder.parts(tensors_in((shards, vector, args, kwargs, buffers))):
            recorder.number(part, known=True)

        def out(shards: Any) -> Any:
            outputs = sharded(shards, buffers, *args, **kwargs)
            return outputs[0] if call.apply.mutable else outputs

        with recorder:
            result = run_operator(transform, out, loss_of, shards, vector)
        # Why before ``del``: callers keep the result, so its end is not the operator's.
        items = [item for *_, item in log]
        del result
    return items, gathered


def _empty_shards(plan: Plan) -> dict[str, dict[str, torch.Tensor]]:
    return {
        unit.name: {
            buffer.key: torch.empty(
                buffer.shard_numel, dtype=buffer.shard_dtype, device="cpu"
            )
            for buffer in unit.buffers
        }
        for unit in plan.unit_list
    }


@dataclass(frozen=True, slots=True)
class _AbsentRanks(Group):
    """One rank of an axis whose other ranks don't exist; its collectives take memory."""

    size: int
    begin: Callable[[Op, Group], Waiting]
    rank: int = 0
    global_rank: int = 0

    def subgroup(self, global_ranks: Sequence[int], axis: str) -> Group:
        return _AbsentRanks(len(global_ranks), self.begin)

    def start(self, op: Op) -> Waiting:
        return self.begin(op, self)
