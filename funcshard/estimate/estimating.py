"""``estimate``: the memory, the time and the traffic of a plan on some hardware."""

from __future__ import annotations

from collections.abc import Iterable

from funcshard._utils.options import check_bytes, check_choice
from funcshard._utils.process_state import without_collection
from funcshard.estimate.machine import (
    Hardware,
    load_hardware,
    source_of_sum,
    weakest,
)
from funcshard.estimate.reports import Report
from funcshard.estimate.trace import Profile
from funcshard.estimate.walk import (
    OPTIMIZERS,
    HardwareClock,
    OptimizerMemory,
    Runtime,
    reserved_band,
    reserved_how,
    simulate_operator,
    simulate_step,
)
from funcshard.plan import (
    Accumulation,
    Plan,
    Schedule,
    Transform,
    check_accumulate,
    check_plan,
    check_transform,
    make_schedule,
    recomputed_modules,
)


def estimate(
    profile: Profile,
    plan: Plan,
    *,
    hardware: str | Hardware = "h100-8x400gbps",
    optimizer: str | OptimizerMemory | None = "adamw",
    schedule: Schedule | None = None,
    remat: Iterable[str] | bool = (),
    accumulate: int | Accumulation = 1,
    budget: int | str | None = None,
    runtime: Runtime | None = None,
    transform: Transform | None = None,
) -> Report:
    """Estimate the memory, the time and the traffic of one step of your training.

    With ``transform``, estimate one call of ``fs.hvp`` or of another operator instead.

    You need no GPU and no other ranks: see docs/estimating.md.

    Arguments:
        profile: your model, as ``profile`` traced it with one micro-batch.
        plan: your plan.
        hardware: name or path of a description, or a ``Hardware``; see ``load_hardware``.
        optimizer: name in ``OPTIMIZERS``, or an ``OptimizerMemory``, or ``None`` for no optimizer.
        schedule: how far to gather ahead; the trace gives the order. By default that of
            ``make_schedule``.
        remat: names or globs of units that backward computes again, or ``True`` for all but the
            root and groups.
        accumulate: number of micro-batches, or an ``Accumulation``.
        budget: memory of a rank in bytes, or as ``"80GiB"``; by default, and at most, the
            hardware's.
        runtime: how ranks communicate; by default as on the hardware.
        transform: an operator of ``predict_events``, by the shards of the loss; ``"gnvp"`` by those
            of the outputs. The rank holds the optimizer's state, and a vector like the shards.

    Returns:
        The report, which you can print.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the profile is of another model or precision, a name is unknown, a number is too
            small, or the plan cuts no leaf along its model axes.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> apply, params, buffers = fs.make_functional(net)
        >>> profile = fs.profile(apply, params, buffers, torch.zeros(8, 64))
        >>> plan = fs.make_plan(params, 8, units=["0", "1"])
        >>> report = fs.estimate(profile, plan)
        >>> report.events == fs.predict_events(plan, report.schedule)
        True
    """
    if not isinstance(profile, Profile):
        raise TypeError(
            f"profile must be the Profile that fs.profile returned; found {type(profile).__name__}"
        )
    check_plan(plan)
    _check_model_axes(plan)
    if not isinstance(schedule, Schedule | None):
        raise TypeError(
            f"schedule must be a Schedule or None; found {schedule!r}: make it with "
            "make_schedule(plan)"
        )
    accumulation = _accumulation(accumulate)
    target_hardware = load_hardware(hardware)
    asked_budget, budget_limit = budget_on(target_hardware, budget)
    remat_modules = recomputed_modules(plan, remat)
    clock = HardwareClock(target_hardware, plan.mesh_axes)
    if not isinstance(runtime, Runtime | None):
        raise TypeError(
            f"runtime must be a Runtime, such as Runtime.fsdp2(), or None; found {runtime!r}"
        )
    check_transform(transform, accumulation)
    on_device = runtime or Runtime.on(target_hardware.device)
    # Note: a GPU saves less for attention and dropout than a CPU does.
    profile = profile.on(accelerator=on_device.accelerator)
    # Why: an estimate makes thousands of small objects, and a garbage collection between takes
    # longer than it does.
    with without_collection():
        held_optimizer, used_schedule = (
            optimizer_memory(optimizer),
            schedule or make_schedule(plan),
        )
        if transform is not None:
            simulation = simulate_operator(
                profile,
                plan,
                clock,
                transform,
                optimizer=held_optimizer,
                runtime=on_device,
                schedule=used_schedule,
                remat=remat_modules,
            )
        else:
            simulation = simulate_step(
                profile,
                plan,
                profile.program(plan, remat=remat_modules),
                clock,
                optimizer=held_optimizer,
                runtime=on_device,
                schedule=used_schedule,
                accumulation=accumulation,
            )
        lanes, timeline = simulation.lanes, simulation.ledger.timeline()
    pool_bytes = simulation.ledger.pools(streams=on_device.streams)
    step_how = source_of_sum((span.seconds, span.source) for span in lanes.spans)
    if any(unit.offload for unit in plan.unit_list):  # copies have no spans
        step_how = weakest(step_how, target_hardware.offload.source.how)
    reserved_range = (0, 0, "")  # the CPU's allocator keeps no pools
    if on_device.accelerator:
        reserved_range = reserved_band(pool_bytes, target_hardware.memory)
    return Report(
        plan=plan,
        schedule=simulation.schedule,
        hardware=target_hardware.name,
        timeline=timeline,
        peak_moment=timeline[simulation.ledger.highest],
        spans=tuple(lanes.spans),
        events=simulation.events,
        step_time=lanes.now,
        exposed=lanes.exposed,
        tokens=profile.tokens * accumulation.micro_batches,
        flops=profile.model_flops * accumulation.micro_batches
        if transform is None
        else sum(span.flops for span in lanes.spans),
        peak_flops=target_hardware.flops.get(profile.compute_dtype, 0.0),
        reserved=reserved_range[:2],
        reserved_source=reserved_range[2],
        budget=budget_limit,
        unit_memory=simulation.unit_memory,
        sources={
            "peak": "calibrated" if on_device.communicators else "traced",
            "traffic": "exact",
            "reserved": reserved_how(target_hardware.name),
            "step_time": step_how,
            "budget": "given"
            if budget_limit == asked_budget
            else target_hardware.sources["memory"].how,
        },
        options={
            "remat": tuple(remat_modules),
            "accumulate": accumulation,
            "optimizer": optimizer,
            "runtime": runtime,
            "budget": asked_budget,
            "transform": transform,
        },
    )


def budget_on(hardware: Hardware, budget: int | str | None) -> tuple[int | None, int]:
    """Return a budget in bytes, and what a rank may use: at most what the device has."""
    if budget is None:
        return None, hardware.memory
    asked_budget = check_bytes("budget", budget, example="80GiB")
    return asked_budget, min(asked_budget, hardware.memory)


def _accumulation(accumulate: int | Accumulation) -> Accumulation:
    """Return what a step runs, by forwards that the profile holds."""
    accumulation = check_accumulate(accumulate)
    if accumulation.forwards != 1:
        raise ValueError(
            f"estimate reads the forwards from the profile; found {accumulation}: leave forwards "
            "out, and profile a function that calls the model as often"
        )
    return accumulation


def _check_model_axes(plan: Plan) -> None:
    """Raise if every rank along the model axes holds the whole model."""
    model_axes = [axis for axis, size in plan.model_axes if size > 1]
    cut_axes = {
        axis for unit in plan.unit_list for buffer in unit.buffers for axis in buffer.local
    }
    if model_axes and cut_axes.isdisjoint(model_axes):
        raise ValueError(
            "estimate needs a plan that cuts leaves along its model axes; found no leaf that is local "
            f"along {' or '.join(map(repr, model_axes))}: trace one rank's part of the model, and "
            f"pass make_plan(..., local={{'path': {{{model_axes[0]!r}: 0}}}}). If ranks hold whole "
            "leaves, plan them as 'replicate'"
        )


def optimizer_memory(optimizer: str | OptimizerMemory | None) -> OptimizerMemory | None:
    """Return the memory of an optimizer."""
    if isinstance(optimizer, str):
        check_choice("optimizer", optimizer, [*OPTIMIZERS])
        return OPTIMIZERS[optimizer]
    if not isinstance(optimizer, OptimizerMemory | None):
        raise TypeError(
            f"optimizer must be a name, one of {', '.join(map(repr, OPTIMIZERS))}, an "
            f"OptimizerMemory or None; found {optimizer!r}: describe its memory with "
            "OptimizerMemory(states=...)"
        )
    return optimizer
