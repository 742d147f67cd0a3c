"""Pictures of reports and plans, drawn with matplotlib.

Source of the colours: "Safe" of CARTOColors (https://carto.com/carto-colors), made to be told apart
with colour blindness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from funcshard._utils import table
from funcshard.estimate.reports.holding_map import Holding, holdings
from funcshard.estimate.reports.perfetto import tracks_of, used_categories
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
_OTHER = "#AA4499"
_INK, _FAINT, _ALARM = "#333333", "#dddddd", "#CC3311"
_PHASES = {
    "forward": "#88CCEE", "loss": "#882255", "backward": "#332288", "optimizer": "#888888",
    "all_gather": "#44AA99", "reduce_scatter": "#CC6677", "all_reduce": "#AA4499",
}  # fmt: skip
_SIZES = (("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40))
_TIMES = (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))
_MOST_RANKS, _MOST_NAMES = 64, 14
_FAR = 2.0  # a budget above so many peaks is named, but not drawn: its line would flatten the rest


def draw_memory(report: Report, *, path: str | Path | None = None) -> Figure:
    """Draw the memory of a rank over the step, stacked by category, with the budget as a line.

    Arguments:
        report: the report.
        path: file to save, such as ``memory.png``.
    """
    figure, axes = _figure(9.0, 4.2)
    category_names = used_categories(report)
    last_second = max(report.step_time, report.timeline[-1].seconds)
    time_scale, time_unit = _scale(last_second, _TIMES)
    byte_scale, size_unit = _scale(max(report.peak, report.budget or 0), _SIZES)
    scaled_times = [
        *(moment.seconds / time_scale for moment in report.timeline),
        last_second / time_scale,
    ]
    # Note: the last moment lasts until the end of the step.
    moments = [*report.timeline, report.timeline[-1]]
    category_stacks = [
        [moment.memory.get(name, 0) / byte_scale for moment in moments] for name in category_names
    ]
    colours = [_COLOURS.get(name, _OTHER) for name in category_names]
    stack_layers = axes.stackplot(
        scaled_times, category_stacks, colors=colours, step="post", **_edges(len(moments))
    )
    peak_moment = report.peak_moment
    axes.plot(
        [peak_moment.seconds / time_scale],
        [peak_moment.total / byte_scale],
        marker="o",
        color=_INK,
        markersize=5,
        zorder=5,
    )
    highest_line = peak_moment.total / byte_scale
    if report.budget is not None:
        budget_height = report.budget / byte_scale
        budget_text = f"budget {table.size(report.budget)}"
        text_style = {
            "color": _ALARM,
            "bbox": {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.5},
        }
        if budget_height <= _FAR * highest_line:
            highest_line = max(highest_line, budget_height)
            axes.axhline(budget_height, color=_ALARM, linestyle="--", linewidth=1.2)
            axes.annotate(
                budget_text,
                (0, budget_height),
                (4, 4),
                textcoords="offset points",
                va="bottom",
                **text_style,
            )
        else:
            corner_place = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "top"}
            axes.annotate(f"↑ {budget_text}", (0, 1), (4, -4), **corner_place, **text_style)
    axes.set_xlim(0, scaled_times[-1])
    axes.set_ylim(0, 1.15 * highest_line)
    axes.set_xlabel(f"time in the step ({time_unit})")
    axes.set_ylabel(f"memory of rank {report.rank} ({size_unit})")
    axes.set_title(
        f"Memory of a step on {report.hardware}, {mesh_text(report.plan.mesh_axes)}", loc="left"
    )
    labels = [
        f"{name}  {table.size(peak_moment.memory[name]) if peak_moment.memory.get(name) else '-'}"
        for name in category_names
    ]
    legend_title = (
        f"peak {table.size(peak_moment.total)} (dot)\nin the {moment_text(peak_moment)}\n"
    )
    _legend(axes, stack_layers[::-1], labels[::-1], legend_title)
    return _saved(figure, path)


def draw_timeline(
    report: Report, *, begin: float = 0.0, end: float | None = None, path: str | Path | None = None
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
    time_scale, time_unit = _scale(last_second, _TIMES)
    span_tracks = {name: spans for name, spans in tracks_of(report).items() if spans}
    shown_spans = [
        (span, row)
        for row, spans in enumerate(span_tracks.values())
        for span in spans
        if span.end > begin and span.begin < last_second
    ]
    shown_spans.sort(key=lambda item: item[0].begin)
    colours = {span.what: _PHASES.get(span.what, _OTHER) for span, _ in shown_spans}
    # Why by colour and row: matplotlib draws a collection in one go, and thousands of bars slowly.
    bar_intervals: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for span, row in shown_spans:
        bar_intervals.setdefault((span.what, row), []).append(
            (span.begin / time_scale, span.seconds / time_scale)
        )
    for (work, row), intervals in bar_intervals.items():
        edge_style, bar_place = _edges(len(shown_spans)), (row - 0.38, 0.76)
        axes.broken_barh(intervals, bar_place, facecolors=colours[work], snap=False, **edge_style)
    for span, row in shown_spans:
        if span.seconds > 0.06 * (last_second - begin):
            middle = (max(span.begin, begin) + min(span.end, last_second)) / 2 / time_scale
            is_dark = colours[span.what] in ("#332288", "#882255", "#888888", "#AA4499", "#CC6677")
            axes.text(
                middle, row, span.unit or "(root)", ha="center", va="center", fontsize=7,
                color="white" if is_dark else _INK, clip_on=True,
            )  # fmt: skip
    axes.set_yticks(range(len(span_tracks)), [*span_tracks])
    axes.set_ylim(len(span_tracks) - 0.5, -0.5)
    axes.set_xlim(begin / time_scale, last_second / time_scale)
    axes.set_xlabel(f"time in the step ({time_unit})")
    step_text, wait_text = table.duration(report.step_time), table.duration(report.exposed)
    lane_text = f"{step_text} a step, {wait_text} of them waiting for collectives"
    axes.set_title(f"Lanes of rank {report.rank}: {lane_text}", loc="left")
    axes.tick_params(left=False)
    axes.grid(visible=False, axis="y")
    from matplotlib.patches import Patch

    legend_handles = [Patch(color=colour) for colour in colours.values()]
    _legend(axes, legend_handles, [work.replace("_", "-") for work in colours])
    return _saved(figure, path)


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
    byte_scale, size_unit = _scale(max(report.peak for report in reports.values()), _SIZES)
    time_scale, time_unit = _scale(max(report.step_time for report in reports.values()), _TIMES)
    points = {
        name: (report.peak / byte_scale, report.step_time / time_scale)
        for name, report in reports.items()
    }
    front_names = pareto_front(reports)
    beaten_points = [points[name] for name in reports if name not in front_names]
    if beaten_points:
        point_style = {"color": "#bbbbbb", "s": 26, "zorder": 2}
        axes.scatter(
            *zip(*beaten_points, strict=True), label="beaten in time and memory", **point_style
        )
    axes.plot(
        *zip(*(points[name] for name in front_names), strict=True), color="#332288", marker="o", drawstyle="steps-post",
        linewidth=1.3, label="front",
    )  # fmt: skip
    report_budgets = {report.budget for report in reports.values() if report.budget is not None}
    axis_width = max(x for x, _ in points.values())
    if len(report_budgets) == 1:
        budget = report_budgets.pop()
        label, dashed_style = f"budget {table.size(budget)}", {"color": _ALARM, "linestyle": "--"}
        if budget / byte_scale <= _FAR * axis_width:
            axis_width = max(axis_width, budget / byte_scale)
            axes.axvline(budget / byte_scale, linewidth=1.2, label=label, **dashed_style)
        else:
            axes.plot([], [], label=f"{label}, off the right edge", **dashed_style)
    axes.set_xlim(0, 1.08 * axis_width)
    axes.set_ylim(0, 1.2 * max(y for _, y in points.values()))
    front_labels = []
    for front_number, name in enumerate(front_names, start=1):
        front_labels.append(f"{front_number}  {name}")
        axes.annotate(
            str(front_number), points[name], (-5, -5), textcoords="offset points", ha="right", va="top", fontsize=8,
            color=_INK,
        )  # fmt: skip
    if len(front_labels) > _MOST_NAMES:
        front_labels[_MOST_NAMES:] = [f"and {len(front_labels) - _MOST_NAMES} more"]
    axes.set_xlabel(f"peak memory of a rank ({size_unit})")
    axes.set_ylabel(f"step time ({time_unit})")
    axes.set_title(
        f"Time against memory of {len(reports)} plans; {len(front_names)} on the front", loc="left"
    )
    handles, labels = axes.get_legend_handles_labels()
    from matplotlib.lines import Line2D

    empty_handles = [Line2D([], [], linestyle="") for _ in front_labels]
    _legend(axes, [*handles, *empty_handles], [*labels, *front_labels])
    return _saved(figure, path)


def pareto_front(reports: Mapping[str, Report]) -> list[str]:
    """Return the reports that none beats in both time and memory, least memory first."""
    ordered_names = sorted(reports, key=lambda name: (reports[name].peak, reports[name].step_time))
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
    import numpy as np

    rank_holdings = holdings(plan)
    # Note: more cells than that are no picture anymore.
    chosen_ranks = list(range(min(plan.world_size, _MOST_RANKS)) if ranks is None else ranks)
    rows = [row for row in rank_holdings.rows if row.buffer.numel]
    part_shades = np.array([[_shade(row, rank) for rank in chosen_ranks] for row in rows])
    part_shades = part_shades.reshape(len(rows), len(chosen_ranks))
    figure, axes = _figure(
        max(5.0, min(12.0, 3.2 + 0.32 * len(chosen_ranks))), 1.3 + 0.36 * len(rows)
    )
    axes.pcolormesh(part_shades, cmap="cividis", vmin=0, vmax=1, edgecolors="white", linewidth=1.0)
    axes.set_ylim(len(rows), 0)
    row_titles = [row.group.title for row in rows]
    if len({row.buffer.key for row in rows}) > 1:
        row_titles = [f"{row.group.title}  {row.buffer.key}" for row in rows]
    axes.set_yticks([i + 0.5 for i in range(len(rows))], row_titles)
    tick_places = range(0, len(chosen_ranks), max(1, len(chosen_ranks) // 16))
    axes.set_xticks([i + 0.5 for i in tick_places], [str(chosen_ranks[i]) for i in tick_places])
    for i, row in enumerate(rows):
        row_text = (
            f"{table.size(row.bytes)} a rank, {row.parts} {'part' if row.parts == 1 else 'parts'}"
        )
        if row.copies > 1:
            row_text += f" × {row.copies} copies"
        axes.text(len(chosen_ranks) + 0.25, i + 0.5, row_text, va="center", fontsize=8, color=_INK)
    axes.set_xlabel("rank")
    shown_text = (
        "" if len(chosen_ranks) == plan.world_size else f"; {len(chosen_ranks)} ranks are drawn"
    )
    axes.set_title(f"Parts of units, {mesh_text(plan.mesh_axes)}{shown_text}", loc="left")
    axes.tick_params(left=False, bottom=False)
    axes.grid(visible=False)
    return _saved(figure, path)


def _shade(row: Holding, rank: int) -> float:
    """Return the shade of the part that a rank holds, from 0 to 1."""
    if row.parts == 1:
        return 0.5
    return row.part(rank) / (row.parts - 1)


def _scale(largest: float, units: Sequence[tuple[str, float]]) -> tuple[float, str]:
    """Return the largest unit up to ``largest``, and its name."""
    name, size = next(((name, size) for name, size in reversed(units) if largest >= size), units[0])
    return size, name


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    pyplot.close(figure)  # the caller shows it; pyplot would show it a second time, and keep it
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    axes.tick_params(colors=_INK, color=_FAINT)
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="y", color=_FAINT, linewidth=0.6)
    axes.title.set_fontsize(11)
    return figure, axes


def _edges(number: int) -> dict[str, Any]:
    """Return the style of edges: none where they would cover the areas."""
    if number > 60:
        return {"linewidth": 0}
    return {"edgecolor": "white", "linewidth": 0.3}


def _legend(
    axes: Any, handles: Sequence[Any], labels: Sequence[str], title: str | None = None
) -> None:
    axes.legend(
        handles, labels, title=title, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8,
        title_fontsize=8, alignment="left", borderaxespad=0.0,
    )  # fmt: skip


def _saved(figure: Figure, path: str | Path | None) -> Figure:
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
