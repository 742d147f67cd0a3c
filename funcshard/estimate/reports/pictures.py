"""Pictures of reports and plans, drawn with matplotlib.

Every function returns a ``matplotlib.figure.Figure``, which notebooks show, and saves it if it is
given a path. Axes of bytes and seconds start at zero.

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

    A budget of more than twice the peak is named at the top instead.

    Arguments:
        report: the report.
        path: the file to save, ``.png``, ``.svg`` or ``.pdf``; ``None`` saves none.
    """
    figure, axes = _figure(9.0, 4.2)
    names = used_categories(report)
    last = max(report.step_time, report.timeline[-1].seconds)
    second, unit = _scale(last, _TIMES)
    byte, size_unit = _scale(max(report.peak, report.budget or 0), _SIZES)
    times = [*(moment.seconds / second for moment in report.timeline), last / second]
    moments = [*report.timeline, report.timeline[-1]]
    stacks = [[moment.memory.get(name, 0) / byte for moment in moments] for name in names]
    colours = [_COLOURS.get(name, _OTHER) for name in names]
    layers = axes.stackplot(times, stacks, colors=colours, step="post", **_edges(len(moments)))
    peak = report.peak_moment
    axes.plot(
        [peak.seconds / second], [peak.total / byte], marker="o", color=_INK, markersize=5, zorder=5
    )
    top = peak.total / byte
    if report.budget is not None:
        line, text = report.budget / byte, f"budget {table.size(report.budget)}"
        style = {
            "color": _ALARM,
            "bbox": {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.5},
        }
        if line <= _FAR * top:
            top = max(top, line)
            axes.axhline(line, color=_ALARM, linestyle="--", linewidth=1.2)
            axes.annotate(text, (0, line), (4, 4), textcoords="offset points", va="bottom", **style)
        else:
            corner = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "top"}
            axes.annotate(f"↑ {text}", (0, 1), (4, -4), **corner, **style)
    axes.set_xlim(0, times[-1])
    axes.set_ylim(0, 1.15 * top)
    axes.set_xlabel(f"time in the step ({unit})")
    axes.set_ylabel(f"memory of rank {report.rank} ({size_unit})")
    axes.set_title(
        f"Memory of a step on {report.hardware}, {mesh_text(report.plan.mesh_axes)}", loc="left"
    )
    labels = [
        f"{name}  {table.size(peak.memory[name]) if peak.memory.get(name) else '-'}"
        for name in names
    ]
    where = f"peak {table.size(peak.total)} (dot)\nin the {moment_text(peak)}\n"
    _legend(axes, layers[::-1], labels[::-1], where)
    return _saved(figure, path)


def draw_timeline(
    report: Report, *, begin: float = 0.0, end: float | None = None, path: str | Path | None = None
) -> Figure:
    """Draw the lanes of a step: when units compute, and when collectives run.

    Arguments:
        report: the report.
        begin: the first second to draw.
        end: the last second to draw; ``None``: the end of the step.
        path: the file to save; ``None`` saves none.
    """
    figure, axes = _figure(10.0, 2.6)
    last = report.step_time if end is None else end
    second, unit = _scale(last, _TIMES)
    tracks = {name: spans for name, spans in tracks_of(report).items() if spans}
    shown = [
        (span, row)
        for row, spans in enumerate(tracks.values())
        for span in spans
        if span.end > begin and span.begin < last
    ]
    shown.sort(key=lambda item: item[0].begin)
    colours = {span.what: _PHASES.get(span.what, _OTHER) for span, _ in shown}
    # Why by colour and row: matplotlib draws a collection in one go, and thousands of bars slowly.
    bars: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for span, row in shown:
        bars.setdefault((span.what, row), []).append((span.begin / second, span.seconds / second))
    for (work, row), intervals in bars.items():
        edges, place = _edges(len(shown)), (row - 0.38, 0.76)
        axes.broken_barh(intervals, place, facecolors=colours[work], snap=False, **edges)
    for span, row in shown:
        if span.seconds > 0.06 * (last - begin):
            middle = (max(span.begin, begin) + min(span.end, last)) / 2 / second
            dark = colours[span.what] in ("#332288", "#882255", "#888888", "#AA4499", "#CC6677")
            axes.text(
                middle, row, span.unit or "(root)", ha="center", va="center", fontsize=7,
                color="white" if dark else _INK, clip_on=True,
            )  # fmt: skip
    axes.set_yticks(range(len(tracks)), [*tracks])
    axes.set_ylim(len(tracks) - 0.5, -0.5)
    axes.set_xlim(begin / second, last / second)
    axes.set_xlabel(f"time in the step ({unit})")
    waits = f"{table.duration(report.step_time)} a step, {table.duration(report.exposed)} of them waiting for collectives"
    axes.set_title(f"Lanes of rank {report.rank}: {waits}", loc="left")
    axes.tick_params(left=False)
    axes.grid(visible=False, axis="y")
    from matplotlib.patches import Patch

    handles = [Patch(color=colour) for colour in colours.values()]
    _legend(axes, handles, [work.replace("_", "-") for work in colours])
    return _saved(figure, path)


def draw_pareto(reports: Mapping[str, Report], *, path: str | Path | None = None) -> Figure:
    """Draw step time against memory of many reports, and the front that none beats in both.

    The front's reports have numbers; the legend names them.

    Arguments:
        reports: the reports by name.
        path: the file to save; ``None`` saves none.

    Raises:
        ValueError: there is no report.
    """
    if not reports:
        raise ValueError(
            "draw_pareto needs at least one report; found none: pass a dictionary of names and "
            "reports"
        )
    figure, axes = _figure(8.0, 4.6)
    byte, size_unit = _scale(max(report.peak for report in reports.values()), _SIZES)
    second, unit = _scale(max(report.step_time for report in reports.values()), _TIMES)
    points = {
        name: (report.peak / byte, report.step_time / second) for name, report in reports.items()
    }
    front = pareto_front(reports)
    beaten = [points[name] for name in reports if name not in front]
    if beaten:
        style = {"color": "#bbbbbb", "s": 26, "zorder": 2}
        axes.scatter(*zip(*beaten, strict=True), label="beaten in time and memory", **style)
    axes.plot(
        *zip(*(points[name] for name in front), strict=True), color="#332288", marker="o", drawstyle="steps-post",
        linewidth=1.3, label="front",
    )  # fmt: skip
    budgets = {report.budget for report in reports.values() if report.budget is not None}
    width = max(x for x, _ in points.values())
    if len(budgets) == 1:
        budget = budgets.pop()
        label, dashed = f"budget {table.size(budget)}", {"color": _ALARM, "linestyle": "--"}
        if budget / byte <= _FAR * width:
            width = max(width, budget / byte)
            axes.axvline(budget / byte, linewidth=1.2, label=label, **dashed)
        else:
            axes.plot([], [], label=f"{label}, off the right edge", **dashed)
    axes.set_xlim(0, 1.08 * width)
    axes.set_ylim(0, 1.2 * max(y for _, y in points.values()))
    listed = []
    for number, name in enumerate(front, start=1):
        listed.append(f"{number}  {name}")
        axes.annotate(
            str(number), points[name], (-5, -5), textcoords="offset points", ha="right", va="top", fontsize=8, color=_INK
        )  # fmt: skip
    if len(listed) > _MOST_NAMES:
        listed[_MOST_NAMES:] = [f"and {len(listed) - _MOST_NAMES} more"]
    axes.set_xlabel(f"peak memory of a rank ({size_unit})")
    axes.set_ylabel(f"step time ({unit})")
    axes.set_title(
        f"Time against memory of {len(reports)} plans; {len(front)} on the front", loc="left"
    )
    handles, labels = axes.get_legend_handles_labels()
    from matplotlib.lines import Line2D

    empty_handles = [Line2D([], [], linestyle="") for _ in listed]
    _legend(axes, [*handles, *empty_handles], [*labels, *listed])
    return _saved(figure, path)


def pareto_front(reports: Mapping[str, Report]) -> list[str]:
    """Return the names of the reports that none beats in both time and memory, least memory first.

    Of reports that are equal in both, the first is on the front.
    """
    ordered = sorted(reports, key=lambda name: (reports[name].peak, reports[name].step_time))
    front: list[str] = []
    for name in ordered:
        if not front or reports[name].step_time < reports[front[-1]].step_time:
            front.append(name)
    return front


def draw_holdings(
    plan: Plan, *, ranks: Sequence[int] | None = None, path: str | Path | None = None
) -> Figure:
    """Draw which rank holds which part of each unit: a cell a unit and rank, a colour a part.

    Ranks with the same colour in a row hold the same part. Equal units are one row.

    Arguments:
        plan: the plan.
        ranks: the ranks to draw; by default the first 64.
        path: the file to save; ``None`` saves none.
    """
    import numpy as np

    rank_holdings = holdings(plan)
    chosen = list(range(min(plan.world_size, _MOST_RANKS)) if ranks is None else ranks)
    rows = [row for row in rank_holdings.rows if row.buffer.numel]
    parts = np.array([[_shade(row, rank) for rank in chosen] for row in rows])
    parts = parts.reshape(len(rows), len(chosen))
    figure, axes = _figure(max(5.0, min(12.0, 3.2 + 0.32 * len(chosen))), 1.3 + 0.36 * len(rows))
    axes.pcolormesh(parts, cmap="cividis", vmin=0, vmax=1, edgecolors="white", linewidth=1.0)
    axes.set_ylim(len(rows), 0)
    titles = [row.group.title for row in rows]
    if len({row.buffer.key for row in rows}) > 1:
        titles = [f"{row.group.title}  {row.buffer.key}" for row in rows]
    axes.set_yticks([i + 0.5 for i in range(len(rows))], titles)
    places = range(0, len(chosen), max(1, len(chosen) // 16))
    axes.set_xticks([i + 0.5 for i in places], [str(chosen[i]) for i in places])
    for i, row in enumerate(rows):
        text = (
            f"{table.size(row.bytes)} a rank, {row.parts} {'part' if row.parts == 1 else 'parts'}"
        )
        if row.copies > 1:
            text += f" × {row.copies} copies"
        axes.text(len(chosen) + 0.25, i + 0.5, text, va="center", fontsize=8, color=_INK)
    axes.set_xlabel("rank")
    shown = "" if len(chosen) == plan.world_size else f"; {len(chosen)} ranks are drawn"
    axes.set_title(f"Parts of units, {mesh_text(plan.mesh_axes)}{shown}", loc="left")
    axes.tick_params(left=False, bottom=False)
    axes.grid(visible=False)
    return _saved(figure, path)


def _shade(row: Holding, rank: int) -> float:
    """Return the shade of the part that a rank holds, from 0 to 1; a buffer of one part is grey."""
    return row.part(rank) / (row.parts - 1) if row.parts > 1 else 0.5


def _scale(largest: float, units: Sequence[tuple[str, float]]) -> tuple[float, str]:
    """Return the largest unit that ``largest`` reaches, and its name."""
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
    """Return the style of edges between ``number`` areas: none where they would cover them."""
    return {"edgecolor": "white", "linewidth": 0.3} if number <= 60 else {"linewidth": 0}


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
