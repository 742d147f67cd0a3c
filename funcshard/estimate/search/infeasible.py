"""``Infeasible``: the reason why no plan fits a budget; ``changes_to_fit``: changes with prices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from funcshard._utils import Part, Shown, Table, table
from funcshard.estimate.estimating import estimate
from funcshard.estimate.machine import Hardware
from funcshard.estimate.reports import Report, left_text, memory_table, moment_text
from funcshard.estimate.trace import Profile
from funcshard.estimate.walk import OptimizerMemory, Runtime
from funcshard.plan import Plan, Schedule, UnitPlan, make_plan

_MORE_RANKS = 6  # doublings


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a plan, and its effect.

    Attributes:
        text: the change as text.
        peak: bytes that it adds to the peak; negative if it saves memory.
        seconds: seconds that it adds to a step.
        share: the same as a share of the step before.
        fits: whether the plan fits then.
        report: the estimate with the change.
    """

    text: str
    peak: int
    seconds: float
    share: float
    fits: bool
    report: Report

    def __str__(self) -> str:
        sign = "−" if self.peak < 0 else "+"
        fits = "" if self.fits else " (not enough)"
        return f"{self.text}: {sign}{table.size(abs(self.peak))}, {self.share:+.0%} step time{fits}".replace(
            "-", "−"
        )


@dataclass(frozen=True, slots=True, repr=False)
class Infeasible(Shown):
    """The answer of ``auto_plan`` if it finds no plan that fits.

    Attributes:
        budget: the budget in bytes.
        report: the estimate of the leanest plan that the search found.
        text: that plan as text.
        considered: number of plans in the space.
        changes: changes of that plan that the space does not hold, with their prices.
    """

    budget: int
    report: Report
    text: str
    considered: int
    changes: tuple[Change, ...]

    fits = False

    def _parts(self) -> list[Part]:
        report = self.report
        over, moment = table.size(report.peak - self.budget), moment_text(report.peak_moment)
        rows = [
            [
                change.text, table.signed(change.peak, table.size), table.signed(change.seconds, table.duration),
                table.signed(change.share, lambda part: table.share(part, 1)), left_text(self.budget, change.report.peak),
            ]
            for change in self.changes
        ]  # fmt: skip
        leanest = f"The leanest one, {self.text}, needs {over} too much in the {moment}."
        return [
            f"None of {self.considered:,} plans fits {table.size(self.budget)}. {leanest}",
            memory_table(report, "Memory at its peak"),
            Table(
                "Changes of it that the space does not hold",
                ["change", "peak", "step", "share", "budget"],
                rows,
            ),
        ]


def changes_to_fit(
    profile: Profile,
    plan: Plan,
    *,
    budget: int | str | None,
    hardware: str | Hardware = "h100-8x400gbps",
    optimizer: str | OptimizerMemory | None = "adamw",
    schedule: Schedule | None = None,
    remat: Sequence[str] = (),
    micro_batches: int = 1,
    runtime: Runtime | None = None,
    local: Any = (),
) -> tuple[Change, ...]:
    """Return single changes of a plan that save memory, those that make it fit first.

    Each change goes as far as the budget asks for: it computes as few more units again as are
    enough, or takes as few more ranks. Each one is simulated. Those that fit come first, the
    fastest first; then those that are not enough, the largest saving first.

    Arguments:
        profile: the profile of one micro-batch.
        plan: the plan.
        budget: bytes that a rank may use, or text such as ``"80GiB"``; ``None`` for the memory of
            the hardware.
        hardware: as in ``estimate``.
        optimizer: as in ``estimate``.
        schedule: as in ``estimate``.
        remat: names of the units that backward computes again now.
        micro_batches: as in ``estimate``.
        runtime: as in ``estimate``.
        local: as in ``make_plan``.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> apply, params, buffers = fs.make_functional(net)
        >>> profile = fs.profile(apply, params, buffers, torch.zeros(8, 64))
        >>> plan = fs.make_plan(params, 2, units=["*"])
        >>> [each.text for each in changes_to_fit(profile, plan, budget="100KiB") if each.fits]
        ['offload shards to the host', '8 times as many ranks']
    """

    def estimated(plan: Plan, again: Sequence[str] = remat, chosen: Any = optimizer) -> Report:
        own_schedule = None if schedule is None else dataclasses.replace(schedule, on_demand=())
        return estimate(
            profile, plan, hardware=hardware, optimizer=chosen, schedule=own_schedule, remat=tuple(again),
            micro_batches=micro_batches, budget=budget, runtime=runtime,
        )  # fmt: skip

    report_before = estimated(plan)
    listed_changes = [
        Change(
            change_text,
            report_after.peak - report_before.peak,
            report_after.step_time - report_before.step_time,
            report_after.step_time / report_before.step_time - 1
            if report_before.step_time
            else 0.0,
            report_after.fits,
            report_after,
        )
        for change_text, report_after in _changed(profile, plan, remat, optimizer, local, estimated)
        if report_after.peak < report_before.peak
    ]
    return tuple(
        sorted(
            listed_changes,
            key=lambda each: (not each.fits, each.seconds if each.fits else each.peak),
        )
    )


def _changed(
    profile: Profile,
    plan: Plan,
    remat: Sequence[str],
    optimizer: Any,
    local: Any,
    estimated: Callable[..., Report],
) -> Iterator[tuple[str, Report]]:
    """Yield changes as text, with the estimate of each."""
    names = [unit.name for unit in plan.unit_list if unit.name and not unit.members]
    other_names = [name for name in names if name not in set(remat)]
    if other_names:
        count, report = _fewest(
            len(other_names), lambda count: estimated(plan, [*remat, *other_names[:count]])
        )
        yield f"remat {count} more of the {len(names)} units", report

    def made(
        mesh: tuple[int, int], change: Callable[[UnitPlan], dict[str, Any]] = lambda unit: {}
    ) -> Plan:
        return _remade(profile, plan, mesh, local, change)

    replicate, shard = plan.mesh_shape
    kept = [
        unit
        for unit in plan.unit_list
        if unit.sharded and not unit.reshard_after_forward and unit.name
    ]
    if kept and shard > 1:
        freed = {
            "strategy": "full_shard",
            "reshard_after_forward": True,
            "reshard_after_backward": True,
        }
        chosen = [unit.name for unit in kept]

        def resharded(count: int) -> Report:
            return estimated(
                made((replicate, shard), lambda unit: freed if unit.name in chosen[:count] else {})
            )

        count, report = _fewest(len(kept), resharded)
        yield f"reshard {count} more units after forward", report
    whole_units = [unit for unit in plan.unit_list if not unit.sharded]
    if whole_units and replicate * shard > 1:
        sharded = {"strategy": "full_shard", "reshard_after_forward": None}
        mesh = (replicate, shard) if shard > 1 else (1, replicate)
        yield (
            "shard all units",
            estimated(made(mesh, lambda unit: sharded if not unit.sharded else {})),
        )
    if replicate > 1 and shard > 1:
        yield f"shard over all {replicate * shard} ranks", estimated(made((1, replicate * shard)))
    if not all(unit.offload for unit in plan.unit_list):
        yield (
            "offload shards to the host",
            estimated(made((replicate, shard), lambda unit: {"offload": True})),
        )
    if optimizer == "adamw":
        yield "a fused optimizer", estimated(plan, chosen="adamw_fused")
    ranks = _first(_MORE_RANKS, lambda power: estimated(made((replicate, shard * 2**power))))
    yield f"{2 ** ranks[0]} times as many ranks", ranks[1]


def _fewest(most: int, report: Callable[[int], Report]) -> tuple[int, Report]:
    """Return the least number for which a report fits, by bisection; ``most`` if none does."""
    low, high = 1, most
    fitting_report = report(most)
    if not fitting_report.fits:
        return most, fitting_report
    while low < high:
        middle = (low + high) // 2
        middle_report = report(middle)
        if middle_report.fits:
            high, fitting_report = middle, middle_report
        else:
            low = middle + 1
    return high, fitting_report


def _first(most: int, report: Callable[[int], Report]) -> tuple[int, Report]:
    """Return the first number from 1 for which a report fits; ``most`` if none does."""
    for power_index in range(1, most):
        if (power_report := report(power_index)).fits:
            return power_index, power_report
    return most, report(most)


def _remade(
    profile: Profile,
    plan: Plan,
    mesh: tuple[int, int],
    local: Any,
    change: Callable[[UnitPlan], dict[str, Any]],
) -> Plan:
    """Return a plan for another mesh, or with other options of its units."""
    options: dict[Any, dict[str, Any]] = {}
    for unit in plan.unit_list:
        if unit.full_precision:
            continue
        unit_options = {
            "strategy": unit.strategy, "offload": unit.offload, "precision": unit.precision,
            "reshard_after_forward": unit.reshard_after_forward or None if unit.strategy != "full_shard"
            else unit.reshard_after_forward,
            "reshard_after_backward": unit.reshard_after_backward,
        }  # fmt: skip
        options[unit.members or unit.name] = {**unit_options, **change(unit)}
    axes = {"replicate": mesh[0], "shard": mesh[1]}
    remade_plan = make_plan(
        profile.forms,
        axes,
        units=options,
        ties=profile.ties,
        local=local,
        precision=plan.precision,
        bucket_bytes=0,
    )
    # Only groups of small units have members.
    names = {unit.members: unit.name for unit in plan.unit_list if unit.members}
    units = tuple(
        dataclasses.replace(unit, name=names.get(unit.members, unit.name))
        for unit in remade_plan.unit_list
    )
    return dataclasses.replace(remade_plan, unit_list=units)
