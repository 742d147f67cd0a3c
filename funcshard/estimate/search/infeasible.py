"""``Infeasible``: the reason why no plan fits a budget; ``changes_to_fit``: changes with prices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from funcshard._utils import Part, Shown, Table, table
from funcshard.estimate.estimating import estimate
from funcshard.estimate.machine import Hardware
from funcshard.estimate.reports import Report, left_text, memory_table, moment_text
from funcshard.estimate.search.space import on_mesh
from funcshard.estimate.trace import Profile
from funcshard.estimate.walk import OptimizerMemory, Runtime
from funcshard.plan import Plan, Schedule, UnitPlan

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

    before = estimated(plan)
    changes = []
    for text, report in _changed(plan, remat, optimizer, estimated):
        seconds = report.step_time - before.step_time
        share = seconds / before.step_time if before.step_time else 0.0
        if report.peak < before.peak:
            changes.append(
                Change(
                    text=text,
                    peak=report.peak - before.peak,
                    seconds=seconds,
                    share=share,
                    fits=report.fits,
                    report=report,
                )
            )
    return tuple(
        sorted(
            changes,
            key=lambda change: (not change.fits, change.seconds if change.fits else change.peak),
        )
    )


def _changed(
    plan: Plan, remat: Sequence[str], optimizer: Any, estimated: Callable[..., Report]
) -> Iterator[tuple[str, Report]]:
    """Yield changes as text, with the estimate of each."""
    units, mesh = plan.unit_list, plan.mesh_shape
    ranks = mesh[0] * mesh[1]
    modules = [unit.name for unit in units if unit.name and not unit.members]
    more = [name for name in modules if name not in set(remat)]
    if more:
        count, report = _fewest(len(more), lambda count: estimated(plan, [*remat, *more[:count]]))
        yield f"remat {count} more of the {len(modules)} units", report

    def resharded(mesh: tuple[int, int], names: Collection[str]) -> Report:
        return estimated(
            on_mesh(plan, mesh, lambda unit: _freed(unit) if unit.name in names else {})
        )

    kept = [
        unit.name for unit in units if unit.sharded and not unit.reshard_after_forward and unit.name
    ]
    if kept and mesh[1] > 1:
        count, report = _fewest(len(kept), lambda count: resharded(mesh, kept[:count]))
        yield f"reshard {count} more units after forward", report
    whole_units = [unit.name for unit in units if not unit.sharded]
    if whole_units and ranks > 1:
        sharded_mesh = mesh if mesh[1] > 1 else (1, ranks)
        yield "shard all units", resharded(sharded_mesh, whole_units)
    if min(mesh) > 1:
        yield f"shard over all {ranks} ranks", resharded((1, ranks), ())
    if not all(unit.offload for unit in units):
        offloaded = on_mesh(plan, mesh, lambda unit: {"offload": True})
        yield "offload shards to the host", estimated(offloaded)
    if optimizer == "adamw":
        yield "a fused optimizer", estimated(plan, chosen="adamw_fused")
    for times in (2**power for power in range(1, _MORE_RANKS + 1)):
        report = resharded((mesh[0], mesh[1] * times), ())
        if report.fits:
            break
    yield f"{times} times as many ranks", report


def _freed(unit: UnitPlan) -> dict[str, Any]:
    """Return the options with which a unit is sharded, and freed if it is not the root."""
    return {
        "strategy": "full_shard",
        "reshard_after_forward": unit.name != "",
        "reshard_after_backward": True,
    }


def _fewest(most: int, report: Callable[[int], Report]) -> tuple[int, Report]:
    """Return the least number for which a report fits, by bisection; ``most`` if none does."""
    low, high = 1, most
    fitting_report = report(most)
    while fitting_report.fits and low < high:
        middle = (low + high) // 2
        middle_report = report(middle)
        if middle_report.fits:
            high, fitting_report = middle, middle_report
        else:
            low = middle + 1
    return high, fitting_report
