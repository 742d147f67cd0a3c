"""``auto_plan``: the fastest plan that fits a budget, or why none does.

Plans that differ only in how many units of the largest class backward recomputes form a ladder. The
search takes ladders in the order of a lower bound of their time, until the bound is over the best
time. On each it looks for the first rung that fits. On a long ladder, it does so by bisection, from
the first rung whose lower bound of the peak fits.

It takes for granted that recomputing more units makes no step faster, and on a long ladder no peak
higher.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from funcshard._utils import table
from funcshard._utils.options import check_count
from funcshard._utils.table import Part, Shown, Table
from funcshard.estimate.estimating import budget_on, estimate, optimizer_memory
from funcshard.estimate.machine import Hardware, load_hardware
from funcshard.estimate.reports import Report, left_text, pareto_front
from funcshard.estimate.search.infeasible import Infeasible
from funcshard.estimate.search.scoring import Score, Scorer
from funcshard.estimate.search.space import (
    MOST_RUNGS,
    Candidate,
    Space,
    ladders,
)
from funcshard.estimate.trace import Profile
from funcshard.estimate.walk import OptimizerMemory, Runtime
from funcshard.plan import AXES, Plan, Schedule, mesh_axes_of

Profiles = Profile | Mapping[int, Profile]

_LEAN = 24  # candidates that are simulated to find a lean one if none fits


@dataclass(frozen=True, slots=True)
class Point:
    """A plan that the search simulated: seconds of a step, bytes at the peak, and its text."""

    seconds: float
    peak: int
    text: str


@dataclass(frozen=True, slots=True, repr=False)
class Best(Shown):
    """The fastest plan that fits; made by ``auto_plan``.

    Attributes:
        plan: the plan.
        schedule: its schedule.
        remat: names of the units to recompute, for ``fully_shard(remat=...)``.
        micro_batches: their number, for ``accumulate``.
        profile: the profile of one micro-batch.
        report: the estimate of the plan.
        text: the plan as text.
        considered: number of plans in the space.
        pareto: the simulated plans that no other one beats in both time and peak.
    """

    plan: Plan
    schedule: Schedule
    remat: tuple[str, ...]
    micro_batches: int
    profile: Profile
    report: Report
    text: str
    considered: int
    pareto: tuple[Point, ...]

    fits = True

    def _parts(self) -> list[Part]:
        report = self.report
        peak_text = f"peak {table.size(report.peak)} of {table.size(report.budget)}"
        table_rows = [
            [
                point.text,
                table.duration(point.seconds),
                table.size(point.peak),
                left_text(report.budget, point.peak),
            ]
            for point in self.pareto
        ]
        return [
            (
                f"Best of {self.considered:,} plans: {self.text}. {table.duration(report.step_time)} "
                f"a step, {peak_text}."
            ),
            Table(
                "Plans of which none is faster and smaller",
                ["plan", "step", "peak", "budget"],
                table_rows,
            ),
        ]


def auto_plan(
    profile: Profiles,
    *,
    ranks: int | Mapping[str, int],
    budget: int | str | None = None,
    hardware: str | Hardware = "h100-8x400gbps",
    optimizer: str | OptimizerMemory | None = "adamw",
    units: Any = (),
    space: Space | None = None,
) -> Best | Infeasible:
    """Find the fastest plan of your model that fits a memory budget on every rank.

    It searches the options of ``space`` and the profiles. docs/estimating.md says when it finds the
    same as a search of all plans.

    Arguments:
        profile: the profile of a rank's batch. ``{1: whole, 2: half}`` also tries micro-batches.
        ranks: number of ranks, or sizes of the mesh's axes, as ``{"shard": 8, "tensor": 2}``. The
            search divides the ranks along replicate and shard; ``space.local`` says what the model
            axes cut.
        budget: as in ``estimate``.
        hardware: as in ``estimate``.
        optimizer: as in ``estimate``.
        units: as in ``make_plan``, without options.
        space: the plans to try.

    Returns:
        The best plan, or an ``Infeasible`` that says which changes would help. Both have ``fits``,
        and you can print them.

    Raises:
        TypeError: ``profile`` isn't a profile.
        ValueError: the budget isn't a number of bytes, or an option is out of range.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> apply, params, buffers = fs.make_functional(net)
        >>> profile = fs.profile(apply, params, buffers, torch.zeros(8, 64))
        >>> best = fs.auto_plan(profile, ranks=8, budget="200KiB", units=["*"])
        >>> best.fits, best.report.peak <= 200 * 1024, best.plan.mesh_shape
        (True, True, (2, 4))
    """
    ranks, model_axes = _data_ranks(ranks)
    space = Space() if space is None else space
    for options in units.values() if isinstance(units, Mapping) else ():
        for name in ("strategy", "reshard_after_forward", "offload"):
            if name in (options or {}):
                raise ValueError(
                    f"auto_plan chooses the options of units itself; found {name!r}: leave it out, or "
                    "say in Space(...) which values to try"
                )
    for mesh in space.meshes or ():
        if mesh[0] * mesh[1] != ranks:
            raise ValueError(
                f"meshes of the space must have {ranks} ranks; found {mesh}: its product is "
                f"{mesh[0] * mesh[1]}"
            )
    target_hardware = load_hardware(hardware)
    _, budget_limit = budget_on(target_hardware, budget)
    runtime = Runtime.on(target_hardware.device)
    profiles = [
        (count, each.on(accelerator=runtime.accelerator))
        for count, each in _profiles(profile)
    ]
    scorer = Scorer(
        profiles=profiles,
        make={
            "mesh": {"shard": 1, **model_axes},
            "units": units,
            "local": space.local,
            "storage": space.storage,
        },
        hardware=target_hardware,
        optimizer=optimizer_memory(optimizer),
        runtime=runtime,
    )
    candidate, fits, scores, plan_count = _search(scorer, space, ranks, budget_limit)
    text, remat = described(candidate, scorer), scorer.remat(candidate)
    micro_batches, best_profile = scorer.profiles[candidate.profile]
    report = estimate(
        best_profile, scorer.plan(candidate), hardware=target_hardware, optimizer=optimizer,
        remat=remat, accumulate=micro_batches, budget=budget,
    )  # fmt: skip
    if fits:
        return Best(
            plan=report.plan,
            schedule=report.schedule,
            remat=remat,
            micro_batches=micro_batches,
            profile=best_profile,
            report=report,
            text=text,
            considered=plan_count,
            pareto=tuple(
                Point(*scores[name], described(name, scorer))
                for name in reversed(pareto_front(scores))
            ),
        )
    return Infeasible(budget_limit, report, text, plan_count, best_profile, target_hardware)


def _search(
    scorer: Scorer, space: Space, ranks: int, budget: int
) -> tuple[Candidate, bool, dict[Candidate, Score], int]:
    """Return the best candidate or the leanest one, whether it fits, and what was scored of all."""
    all_ladders = list(ladders(space, ranks, scorer.classes, len(scorer.profiles)))
    assert all_ladders, "a space has at least one plan"
    # Note: all ladders are equally high.
    rung_count = len(all_ladders[0].counts)
    fixed_figures = [scorer.fixed(ladder.first) for ladder in all_ladders]
    scores: dict[Candidate, Score] = {}
    best: tuple[float, int, int, int] | None = None

    def score(ladder_index: int, rung: int) -> Score:
        candidate = all_ladders[ladder_index].rung(rung)
        if candidate not in scores:
            scores[candidate] = scorer.score(candidate)
        return scores[candidate]

    def too_slow(seconds: float) -> bool:
        return best is not None and seconds > best[0]

    def least(ladder_index: int, rung: int) -> Score:
        candidate = all_ladders[ladder_index].rung(rung)
        return scorer.least(candidate, fixed_figures[ladder_index])

    def may_fit(ladder_index: int, rung: int) -> bool:
        return least(ladder_index, rung).peak <= budget

    def ends(ladder_index: int, rung: int) -> bool:
        """Return whether a rung fits, or is too slow, as are all above it."""
        seconds, peak = score(ladder_index, rung)
        return peak <= budget or too_slow(seconds)

    def first_end(ladder_index: int, low_rung: int) -> int | None:
        """Return the first rung from one on that ends, or ``None`` if no rung can win."""
        high_rung = rung_count - 1
        # Note: the last rung is traced, as those beside it are, so it says first whether to look
        # there.
        if not may_fit(ladder_index, high_rung):
            return None
        fitting = functools.partial(may_fit, ladder_index)
        low_rung = bisect.bisect_left(range(rung_count), True, lo=low_rung, key=fitting)
        if too_slow(least(ladder_index, low_rung).step_time):
            return None
        if not (ends(ladder_index, low_rung) or ends(ladder_index, high_rung)):
            return None
        # Why one after the other: the bound of the peak is close, so the first one is near.
        return next(
            rung for rung in range(low_rung, rung_count) if ends(ladder_index, rung)
        )

    time_bounds = [least(i, 0).step_time for i in range(len(all_ladders))]
    ladder_order = sorted(range(len(all_ladders)), key=time_bounds.__getitem__)
    # Why not with rungs: the bound of a last one would take a trace.
    if rung_count == 1 and not any(may_fit(i, 0) for i in ladder_order):
        ladder_order = []
    # Note: after the first ladder whose bound is over the best time, none can win.
    for i in ladder_order:
        if too_slow(time_bounds[i]):
            break
        # Note: no rung of the ladder fits, because recomputation frees activations only.
        if fixed_figures[i].held > budget:
            continue
        rungs = range(rung_count)
        if rung_count > MOST_RUNGS:
            # Why the first one before: most ladders end there, as slower than the best plan. Before
            # there is one, a first rung that recomputes other units would take a trace.
            is_traced = not any(choice.remat for choice in all_ladders[i].first.choices)
            begins = best is not None or is_traced
            first_rung = 0 if begins and ends(i, 0) else first_end(i, int(begins))
            if first_rung is None:
                continue
            rungs = rungs[first_rung : first_rung + 1]
        for rung in rungs:
            seconds, peak = score(i, rung)
            # Note: later rungs recompute more, so they are slower still.
            if too_slow(seconds):
                break
            # Note: the position makes the first one win of plans that are equal in time and peak.
            if peak <= budget and (best is None or (seconds, peak, i, rung) < best):
                best = seconds, peak, i, rung
    plan_count = rung_count * len(all_ladders)
    if best is not None:
        return all_ladders[best[2]].rung(best[3]), True, scores, plan_count
    # Note: nothing fits, so the last rungs of the smallest ladders are candidates for the leanest
    # plan. None is leaner after the first one whose bound is over the least peak.
    held_bytes = [fixed_part.held for fixed_part in fixed_figures]
    lean_count = max(_LEAN, sum(size <= budget for size in held_bytes))
    lean_ladders = sorted(range(len(all_ladders)), key=held_bytes.__getitem__)[:lean_count]
    peak_bounds = {i: least(i, rung_count - 1).peak for i in lean_ladders}
    least_peak = math.inf
    for i in sorted(lean_ladders, key=peak_bounds.__getitem__):
        if peak_bounds[i] > least_peak:
            break
        least_peak = min(least_peak, score(i, rung_count - 1).peak)
    lean_candidate = min(
        scores, key=lambda candidate: (scores[candidate].peak, scores[candidate].step_time)
    )
    return lean_candidate, False, scores, plan_count


def _data_ranks(ranks: int | Mapping[str, int]) -> tuple[int, dict[str, int]]:
    """Return the number of ranks along replicate and shard, and the sizes of the model axes."""
    if not isinstance(ranks, Mapping):
        return check_count("ranks", ranks, of="ranks"), {}
    sizes = mesh_axes_of(ranks, "ranks")
    data_sizes = [sizes.pop(axis, 1) for axis in AXES]
    return math.prod(data_sizes), sizes


def _profiles(profile: Profiles) -> Iterator[tuple[int, Profile]]:
    """Yield the number of micro-batches and the profile of each way to split the batch."""
    by_count = profile if isinstance(profile, Mapping) else {1: profile}
    if not by_count:
        raise ValueError(
            "profile must hold at least one Profile; found {}: pass fs.profile(...)"
        )
    for count, single_profile in by_count.items():
        if not isinstance(single_profile, Profile):
            raise TypeError(
                "profile must be the Profile that fs.profile returned, or a dictionary from numbers "
                f"of micro-batches to them; found {type(single_profile).__name__}"
            )
        yield check_count("micro-batches", count, of="micro-batches"), single_profile


def described(candidate: Candidate, scorer: Scorer) -> str:
    """Return a candidate as text."""
    replicate, shard = candidate.mesh
    parts = [f"{shard} shards" if replicate == 1 else f"{replicate} × {shard} ranks"]
    if len(scorer.profiles) > 1:
        parts.append(f"{scorer.profiles[candidate.profile][0]} micro-batches")
    for units, choice in zip(scorer.classes, candidate.choices, strict=True):
        unit_count = len(units.names)
        for count, choice_verb in (
            (unit_count * (choice.strategy == "no_shard"), "replicate"),
            (choice.kept, "keep"),
            (choice.remat, "remat"),
        ):
            how_many = (
                f"all {unit_count} " if count == unit_count else f"{count} of {unit_count} "
            )
            if count:
                parts.append(
                    f"{choice_verb} {how_many if unit_count > 1 else ''}{units.title}"
                )
    return ", ".join(parts)
