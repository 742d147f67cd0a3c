"""``Infeasible``: why no plan fits a budget, and changes that would help, with their prices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from funcshard._utils import table
from funcshard._utils.table import Part, Shown, Table
from funcshard.estimate.estimating import estimate
from funcshard.estimate.machine import Hardware
from funcshard.estimate.reports import Report, left_text, memory_table, moment_text
from funcshard.estimate.search.scoring import unit_options
from funcshard.estimate.search.space import on_mesh
from funcshard.estimate.trace import Profile, equal_units
from funcshard.plan import Plan, UnitPlan

_MORE_RANKS = 6  # doublings


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a plan, and its effect.

    Attributes:
        text: the change as text.
        peak: bytes that it adds to the peak; negative if it saves memory.
        seconds: seconds that it adds to a step.
        share: these seconds, as a share of the step before.
        fits: whether the plan then fits.
        report: the estimate with the change.
    """

    text: str
    peak: int
    seconds: float
    share: float
    fits: bool
    report: Report

    def __str__(self) -> str:
        peak, share = (
            table.signed(self.peak, table.size),
            f"{self.share:+.0%}".replace("-", "−"),
        )
        fits_text = "" if self.fits else " (not enough)"
        return f"{self.text}: {peak}, {share} step time{fits_text}"


@dataclass(frozen=True, slots=True, repr=False)
class Infeasible(Shown):
    """The answer of ``auto_plan`` if no plan fits.

    Attributes:
        budget: the budget in bytes.
        report: the estimate of the leanest plan.
        text: that plan as text.
        considered: number of plans in the space.
        profile: the profile of one micro-batch of that plan.
        hardware: the hardware.
    """

    budget: int
    report: Report
    text: str
    considered: int
    profile: Profile
    hardware: Hardware

    fits = False

    @property
    def changes(self) -> tuple[Change, ...]:
        """Changes of the leanest plan beyond the space."""
        # Why late: they take traces, and a search in several steps reads those of the last one.
        return changes_to_fit(self.profile, self.report, self.hardware)

    def _parts(self) -> list[Part]:
        report = self.report
        bytes_over = table.size(report.peak - self.budget)
        peak_text = moment_text(report.peak_moment)
        table_rows = [
            [
                change.text, table.signed(change.peak, table.size), table.signed(change.seconds, table.duration),
                table.signed(change.share, lambda part: table.share(part, 1)), left_text(self.budget, change.report.peak),
            ]
            for change in self.changes
        ]  # fmt: skip
        return [
            (
                f"None of {self.considered:,} plans fits {table.size(self.budget)}. The leanest one, "
                f"{self.text}, needs {bytes_over} too much in the {peak_text}."
            ),
            memory_table(report, "Memory at its peak"),
            Table(
                "Changes of it that the space does not hold",
                ["change", "peak", "step", "share", "budget"],
                table_rows,
            ),
        ]


def changes_to_fit(
    profile: Profile, before: Report, hardware: str | Hardware
) -> tuple[Change, ...]:
    """Return single changes that save memory: those that fit, the fastest first, then the others.

    Each goes only as far as the budget asks for.

    Arguments:
        profile: the profile of one micro-batch.
        before: the estimate of the plan.
        hardware: the hardware of the estimate.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> apply, params, buffers = fs.make_functional(net)
        >>> profile = fs.profile(apply, params, buffers, torch.zeros(8, 64))
        >>> report = fs.estimate(profile, fs.make_plan(params, 2, units=["*"]), budget="100KiB")
        >>> [each.text for each in changes_to_fit(profile, report, "h100") if each.fits]
        ['offload shards to the host', '8 times as many ranks']
    """
    # Why without: units on demand are those of the plan before the change.
    schedule = dataclasses.replace(before.schedule, on_demand=())

    def estimated(plan: Plan, **changes: Any) -> Report:
        options: Any = {**before.options, **changes}
        return estimate(profile, plan, hardware=hardware, schedule=schedule, **options)

    program = profile.program(before.plan)
    unit_groups = sorted(equal_units(before.plan, program), key=len, reverse=True)
    # Note: beside equal units, single ones save little, and each of them takes a trace.
    # Note: backward can recompute modules that forward calls, neither the root nor groups.
    module_names = [
        unit.name
        for group in unit_groups
        for unit in group
        if unit.name in program.order and unit.name and not unit.members
        if len(group) > 1 or len(unit_groups[0]) == 1
    ]
    unit_saved = max((program.saved.get(name, 0) for name in module_names), default=0)
    saving_changes = []
    for change_text, report in _changed(before, module_names, unit_saved, estimated):
        seconds = report.step_time - before.step_time
        share = seconds / before.step_time if before.step_time else 0.0
        more_bytes = report.peak - before.peak
        if more_bytes < 0:
            saving_changes.append(
                Change(change_text, more_bytes, seconds, share, report.fits, report)
            )
    saving_changes.sort(key=lambda c: (not c.fits, c.seconds if c.fits else c.peak))
    return tuple(saving_changes)


def _changed(
    before: Report,
    module_names: Sequence[str],
    unit_saved: int,
    estimated: Callable[..., Report],
) -> Iterator[tuple[str, Report]]:
    plan, remat = before.plan, before.remat
    units, mesh = plan.unit_list, plan.mesh_shape
    ranks = mesh[0] * mesh[1]
    more_modules = [name for name in module_names if name not in set(remat)]
    if more_modules:
        # Why a guess: each number takes a trace if it's near the first or the last one.
        begin = math.ceil((before.peak - before.budget) / max(unit_saved, 1))
        count, report = _fewest(
            len(more_modules),
            begin,
            before.peak,
            lambda count: estimated(plan, remat=(*remat, *more_modules[:count])),
        )
        yield f"remat {count} more of the {len(module_names)} units", report

    def resharded(mesh: tuple[int, int], names: Collection[str]) -> Report:
        def freed(unit: UnitPlan) -> dict[str, Any]:
            if unit.name not in names:
                return {}
            return {**unit_options("full_shard", unit), "reshard_after_backward": True}

        return estimated(on_mesh(plan, mesh, freed))

    kept_units = [
        unit.name
        for unit in units
        if unit.sharded and not unit.reshard_after_forward and unit.name
    ]
    if kept_units and mesh[1] > 1:
        count, report = _fewest(
            len(kept_units),
            len(kept_units),
            before.peak,
            lambda count: resharded(mesh, kept_units[:count]),
        )
        yield f"reshard {count} more units after forward", report
    whole_units = [unit.name for unit in units if not unit.sharded]
    if whole_units and ranks > 1:
        # Note: without a shard axis, the replicas become it.
        sharded_mesh = mesh if mesh[1] > 1 else (1, ranks)
        yield "shard all units", resharded(sharded_mesh, whole_units)
    # Note: replicas hold whole copies, so sharding over all ranks saves memory without more ranks.
    if min(mesh) > 1:
        yield f"shard over all {ranks} ranks", resharded((1, ranks), ())
    if not all(unit.offload for unit in units):
        offloaded_plan = on_mesh(plan, mesh, lambda unit: {"offload": True})
        yield "offload shards to the host", estimated(offloaded_plan)
    if before.options["optimizer"] == "adamw":
        yield "a fused optimizer", estimated(plan, optimizer="adamw_fused")
    for rank_factor in (2**power for power in range(1, _MORE_RANKS + 1)):
        report = resharded((mesh[0], mesh[1] * rank_factor), ())
        if report.fits:
            break
    # Note: if no factor is enough, this is the largest, and the change does not fit.
    yield f"{rank_factor} times as many ranks", report


def _fewest(
    most: int, begin: int, peak: int, report: Callable[[int], Report]
) -> tuple[int, Report]:
    """Return the least number for which a report fits; ``most`` if none does.

    Arguments:
        most: the largest number.
        begin: the number to begin with.
        peak: bytes at the peak for 0.
        report: the estimate for a number.
    """
    low_count, high_count, count = 0, most + 1, min(max(begin, 1), most)
    while True:
        count_report = report(count)
        if count_report.fits:
            high_count, fitting_report = count, count_report
        else:
            low_count = count
        if low_count == most:
            return most, count_report
        if high_count - low_count == 1:
            return high_count, fitting_report
        # Why by proportion: equal units save equally much, so this takes two or three estimates.
        saved_share = (peak - count_report.budget) / max(peak - count_report.peak, 1)
        count = min(max(math.ceil(saved_share * count), low_count + 1), high_count - 1)
