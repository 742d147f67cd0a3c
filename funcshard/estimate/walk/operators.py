"""``simulate_operator``: walk through an operator such as ``hvp``, and count memory and time."""

from __future__ import annotations

from collections.abc import Sequence

from funcshard.estimate.trace import Held, Profile, Run, Waited, trace_operator
from funcshard.estimate.walk.lanes import HardwareClock, Lanes
from funcshard.estimate.walk.ledger import Ledger
from funcshard.estimate.walk.runtime import OptimizerMemory, Runtime
from funcshard.estimate.walk.simulator import Simulation, hold_between_steps
from funcshard.estimate.walk.sizes import sizes_by_unit
from funcshard.plan import Event, Plan, Schedule, Transform


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
    events: list[Event] = []
    ends: list[float] = []
    runs: list[Run] = []  # Why kept: lanes know the costs of runs by identity.
    for item in trace_operator(profile.call, plan, transform, remat):
        if isinstance(item, Run):
            runs.append(item)
            begin = lanes.now
            lanes.compute(item)
            ledger.run(item, begin, lanes.now)
        elif isinstance(item, Held):
            ledger.add("gathered", item.change)
            ledger.note(lanes.now, transform, item.unit)
        elif isinstance(item, Waited):
            lanes.wait(ends[item.event_index])
        else:
            assert item.unit is not None, "the trace has collectives of units alone"
            lane, unit_sizes = "gather" if item.kind == "all_gather" else "reduce", sizes[item.unit]
            if unit_sizes.offload:
                lanes.copy(lane, unit_sizes.buffers[item.buffer].shard)
            events.append(item)
            ends.append(lanes.communicate(lane, item))
    lanes.wait_for_all()
    ledger.clear_tape()
    ledger.note(lanes.now, "end", "")
    return Simulation(
        schedule=schedule,
        ledger=ledger,
        spans=tuple(lanes.spans),
        events=tuple(events),
        step_time=lanes.now,
        exposed=lanes.exposed,
        unit_memory={
            name: {"shards": unit.shard} for name, unit in sizes.items() if not unit.offload
        },
    )
