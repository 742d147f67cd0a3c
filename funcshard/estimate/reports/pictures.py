"""Pictures of reports and plans, drawn with matplotlib.

Source of the colours: "Safe" of CARTOColors (https://carto.com/carto-colors), made to be told apart
with colour blindness.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from funcshard._utils import table
from funcshard.estimate.reports.holding_map import holdings
from funcshard.estimate.reports.report import Report, moment_text
from funcshard.plan import Plan, mesh_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Tensors that live through the whole step are pale, so that all other tensors stand out.
_COLOURS = {
    "shards": "#888888", "optimizer": "#bbbbbb", "buffers": "#661100", "inputs": "#DDCC77", "communicators": "#999933",
    "gathered": "#332288", "activations": "#88CCEE", "temporaries": "#6699CC", "loss": "#882255", "gradients": "#117733",
    "reduction": "#CC6677", "gradient shards": "#44AA99",
}  # fmt: skip
# Light ones, on which the names of units can be read.
_PHASES = {
    "forward": "#88CCEE", "loss": "#DDAACC", "backward": "#99AADD", "optimizer": "#bbbbbb",
    "all_gather": "#88CCBB", "reduce_scatter": "#EE99AA", "all_reduce": "#CCAADD",
}  # fmt: skip
_OTHER, _INK, _ALARM = "#DDCC77", "#333333", "#CC3311"
_MOST_RANKS, _MOST_NAMES = 64, 14
_FAR = 2.0  # a budget above so many peaks is not drawn: its line would flatten the rest
_BESIDE = {
    "loc": "upper left",
    "bbox_to_anchor": (1.01, 1.0),
    "frameon": False,
    "fontsize": 8,
}


def draw_memory(report: Report, *, path: str | Path | None = None) -> Figure:
    """Draw the memory of a rank over the step, stacked by category, with the budget as a line.

    Arguments:
        report: the report.
        path: file to save, such as ``memory.png``.
    """
    figure, axes = _figure(9.0, 4.2)
    category_names = report.categories
    last_second = max(report.step_time, report.timeline[-1].seconds)
    byte_scale, size_unit = table.unit_of(report.peak)
    # Note: the last moment lasts until the end of the step.
    moments = [*report.timeline, report.timeline[-1]]
    seconds = [*(moment.seconds for moment in report.timeline), last_second]
    peak_moment = report.peak_moment
    axes.stackplot(
        seconds,
        [
            [moment.memory.get(name, 0) / byte_scale for moment in moments]
            for name in category_names
        ],
        labels=[
            f"{name}  {table.size(peak_moment.memory.get(name, 0))}"
            for name in category_names
        ],
        colors=[_COLOURS.get(name, _OTHER) for name in category_names],
        step="post",
    )
    axes.plot([peak_moment.seconds], [peak_moment.total / byte_scale], "o", color=_INK)
    legend_title = (
        f"peak {table.size(peak_moment.total)} (dot)\nin the {moment_text(peak_moment)}"
    )
    legend_title += f"\nbudget {table.size(report.budget)}"
    if report.budget <= _FAR * report.peak:
        axes.axhline(report.budget / byte_scale, color=_ALARM, linestyle="--")
    axes.set(xlim=(0, last_second), ylim=(0, None))
    _label_times(axes.xaxis, "time in the step")
    axes.set_ylabel(f"memory of a rank ({size_unit})")
    axes.legend(title=legend_title, reverse=True, **_BESIDE)
    title = f"Memory of a step on {report.hardware}, {mesh_text(report.plan.mesh_axes)}"
    return _finished(figure, title, path)


def draw_timeline(
    report: Report,
    *,
    begin: float = 0.0,
    end: float | None = None,
    path: str | Path | None = None,
) -> Figure:
    """Draw the lanes of a step: when units compute, and when collectives run.

    Arguments:
        report: the report.
        begin: the first second to draw.
        end: the last second to draw; ``None``: the end of the step.
        path: file to save.
    """
    figure, axes = _figure(10.0, 2.6)
    last_second = report.step_time if end is None else end
    span_tracks = report.tracks
    # Why by work and row: matplotlib draws a collection in one go, and thousands of bars slowly.
    bar_intervals: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for row, spans in enumerate(span_tracks.values()):
        for span in spans:
            if span.end > begin and span.begin < last_second:
                bar_intervals[span.what, row].append((span.begin, span.seconds))
                if span.seconds > 0.06 * (last_second - begin):
                    middle = (max(span.begin, begin) + min(span.end, last_second)) / 2
                    text_style = {
                        "ha": "center",
                        "va": "center",
                        "fontsize": 7,
                        "clip_on": True,
                    }
                    axes.text(middle, row, span.unit or "(root)", **text_style)
    bars_of_work = {}
    for (work, row), intervals in bar_intervals.items():
        colour = _PHASES.get(work, _OTHER)
        bars_of_work[work] = axes.broken_barh(intervals, (row - 0.38, 0.76), color=colour)
    axes.set_yticks(range(len(span_tracks)), [*span_tracks])
    axes.set(ylim=(len(span_tracks) - 0.5, -0.5))
    axes.set(xlim=(begin, last_second))
    _label_times(axes.xaxis, "time in the step")
    step_text, wait_text = table.duration(report.step_time), table.duration(report.exposed)
    lane_text = f"{step_text} a step, {wait_text} of them waiting for collectives"
    work_names = [work.replace("_", "-") for work in bars_of_work]
    axes.legend(list(bars_of_work.values()), work_names, **_BESIDE)
    return _finished(figure, f"Lanes of a rank: {lane_text}", path)


def draw_pareto(reports: Mapping[str, Report], *, path: str | Path | None = None) -> Figure:
    """Draw step time against memory of many reports, and name those that none beats in both.

    Arguments:
        reports: the reports by name.
        path: file to save.

    Raises:
        ValueError: there is no report.
    """
    if not reports:
        raise ValueError(
            "draw_pareto needs at least one report; found none: pass a dictionary of names and "
            "reports"
        )
    figure, axes = _figure(8.0, 4.6)
    most_bytes = max(report.peak for report in reports.values())
    byte_scale, size_unit = table.unit_of(most_bytes)
    points = {
        name: (report.peak / byte_scale, report.step_time)
        for name, report in reports.items()
    }
    front_names = pareto_front(reports)
    axes.scatter(*zip(*points.values(), strict=True), color="#bbbbbb", label="all plans")
    front_points = [points[name] for name in front_names]
    axes.plot(*zip(*front_points, strict=True), "o-", drawstyle="steps-post", label="front")
    budget, *other_budgets = {report.budget for report in reports.values()}
    if not other_budgets and budget <= _FAR * most_bytes:
        label = f"budget {table.size(budget)}"
        axes.axvline(budget / byte_scale, color=_ALARM, linestyle="--", label=label)
    for number, name in enumerate(front_names[:_MOST_NAMES], start=1):
        axes.annotate(
            str(number), points[name], (3, 3), textcoords="offset points", fontsize=8
        )
        axes.plot([], [], " ", label=f"{number}  {name}")
    if len(front_names) > _MOST_NAMES:
        axes.plot([], [], " ", label=f"and {len(front_names) - _MOST_NAMES} more")
    axes.margins(0.08)  # Why not from 0: plans that are compared are often close
    axes.set_xlabel(f"peak memory of a rank ({size_unit})")
    _label_times(axes.yaxis, "step time")
    axes.legend(**_BESIDE)
    title = f"Time against memory of {len(reports)} plans; {len(front_names)} on the front"
    return _finished(figure, title, path)


def pareto_front(reports: Mapping[Any, Any]) -> list[Any]:
    """Return the reports that none beats in both time and memory, least memory first."""
    ordered_names = sorted(
        reports, key=lambda name: (reports[name].peak, reports[name].step_time)
    )
    # Note: by rising memory, each report of the front is faster than the one before.
    front_names: list[str] = []
    for name in ordered_names:
        if not front_names or reports[name].step_time < reports[front_names[-1]].step_time:
            front_names.append(name)
    return front_names


def draw_holdings(
    plan: Plan, *, ranks: Sequence[int] | None = None, path: str | Path | None = None
) -> Figure:
    """Draw which rank holds which part of each unit, as a colour.

    Arguments:
        plan: your plan.
        ranks: the ranks to draw; by default the first 64.
        path: file to save.
    """
    # Note: more cells than that are no picture anymore.
    chosen_ranks = list(
        range(min(plan.world_size, _MOST_RANKS)) if ranks is None else ranks
    )
    rows = [row for row in holdings(plan).rows if row.buffer.numel]
    # Note: a unit that's whole everywhere has the shade in the middle.
    part_shades = [
        [
            row.part(rank) / (row.parts - 1) if row.parts > 1 else 0.5
            for rank in chosen_ranks
        ]
        for row in rows
    ]
    width = max(5.0, min(12.0, 3.2 + 0.32 * len(chosen_ranks)))
    figure, axes = _figure(width, 1.3 + 0.36 * len(rows))
    axes.pcolormesh(part_shades, cmap="cividis", vmin=0, vmax=1, edgecolors="white")
    axes.set(ylim=(len(rows), 0))
    row_titles = [f"{row.group.title}  {row.buffer.key}" for row in rows]
    axes.set_yticks([i + 0.5 for i in range(len(rows))], row_titles)
    tick_places = range(0, len(chosen_ranks), max(1, len(chosen_ranks) // 16))
    axes.set_xticks(
        [i + 0.5 for i in tick_places], [str(chosen_ranks[i]) for i in tick_places]
    )
    for i, row in enumerate(rows):
        row_text = f"{table.size(row.bytes)} a rank, {row.parts} × {row.copies}"
        axes.text(len(chosen_ranks) + 0.25, i + 0.5, row_text, va="center", fontsize=8)
    axes.set_xlabel(f"{len(chosen_ranks)} of {plan.world_size} ranks")
    title = f"Parts of units, {mesh_text(plan.mesh_axes)}; beside them parts × copies"
    return _finished(figure, title, path)


def _label_times(axis: Any, label: str) -> None:
    axis.set_major_formatter(lambda seconds, _: table.duration(seconds))
    axis.set_label_text(label)


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    pyplot.close(
        figure
    )  # the caller shows it; pyplot would show it a second time, and keep it
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _finished(figure: Figure, title: str, path: str | Path | None) -> Figure:
    figure.axes[0].set_title(title, loc="left")
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
