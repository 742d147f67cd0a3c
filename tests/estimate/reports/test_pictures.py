"""The pictures, measured on their axes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from funcshard.estimate.reports.pictures import draw_holdings, draw_memory, draw_pareto, draw_timeline, pareto_front
from funcshard.estimate.reports.report import Report
from tests.estimate.made_reports import MIB, plan_of, report_of

REPORT = report_of(budget=24 * MIB)


def reports_of(*pairs: tuple[int, float]) -> dict[str, Report]:
    """Return reports with given activations in MiB and step times in seconds."""
    return {f"{size}, {time}": dataclasses.replace(report_of(saved=size * MIB), step_time=time) for size, time in pairs}


def legend_of(figure) -> list[str]:  # type: ignore[no-untyped-def]
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_the_stack_reaches_the_peak_and_starts_at_zero() -> None:
    figure = draw_memory(REPORT)
    (axes,) = figure.axes
    tops = [path.vertices[:, 1].max() for layer in axes.collections for path in layer.get_paths()]
    assert max(tops) == pytest.approx(REPORT.peak / MIB)
    assert axes.get_ylim()[0] == axes.get_xlim()[0] == 0
    assert axes.get_ylim()[1] > 24
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("time in the step (ms)", "memory of rank 0 (MiB)")
    assert axes.get_xlim()[1] == pytest.approx(1000 * REPORT.step_time)
    assert [text.get_text() for text in axes.texts] == ["budget 24.0 MiB"]
    assert legend_of(figure) == [
        "gradients  2.0 MiB", "activations  12.0 MiB", "gathered  2.0 MiB", "inputs  64 B", "optimizer  2.2 MiB",
        "shards  1.1 MiB",
    ]  # fmt: skip
    assert axes.get_legend().get_title().get_text() == "peak 19.4 MiB (dot)\nin the backward of blocks.3\n"


@pytest.mark.parametrize(
    ("budget", "texts", "top"), [(38, ["budget 38.0 MiB"], 38), (80, ["↑ budget 80.0 MiB"], None), (None, [], None)]
)
def test_a_budget_far_above_the_peak_does_not_flatten_the_picture(budget: Any, texts: list[str], top: Any) -> None:
    (axes,) = draw_memory(dataclasses.replace(REPORT, budget=budget and budget * MIB)).axes
    assert [text.get_text() for text in axes.texts] == texts
    assert len(axes.lines) == (2 if top else 1)  # the dot, and the budget
    assert axes.get_ylim()[1] == pytest.approx(1.15 * (top or REPORT.peak / MIB))


def test_each_lane_has_its_spans() -> None:
    figure = draw_timeline(REPORT)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["compute", "gather", "reduce"]
    widths = [np.ptp(path.vertices[:, 0]) / 1e3 for bars in axes.collections for path in bars.get_paths()]
    assert sum(widths) == pytest.approx(sum(span.seconds for span in REPORT.spans))
    assert legend_of(figure) == ["all-gather", "forward", "backward", "reduce-scatter"]
    assert [text.get_text() for text in axes.texts][:4] == [f"blocks.{i}" for i in range(4)]


def test_a_part_of_the_step_can_be_drawn() -> None:
    (axes,) = draw_timeline(REPORT, begin=0.09, end=0.12).axes
    assert axes.get_xlim() == pytest.approx((90, 120))
    assert len([path for bars in axes.collections for path in bars.get_paths()]) == 5


@pytest.mark.parametrize(
    ("pairs", "front"),
    [
        ([(1, 5.0)], ["1, 5.0"]),
        ([(1, 5.0), (2, 4.0), (3, 4.5), (4, 3.0)], ["1, 5.0", "2, 4.0", "4, 3.0"]),
        ([(3, 1.0), (2, 1.0), (1, 1.0)], ["1, 1.0"]),
        ([(2, 2.0), (2, 1.0)], ["2, 1.0"]),
    ],
)
def test_the_front_has_the_reports_that_none_beats(pairs: list[tuple[int, float]], front: list[str]) -> None:
    assert pareto_front(reports_of(*pairs)) == front


def test_the_pareto_picture_numbers_the_front_and_names_it_in_the_legend() -> None:
    figure = draw_pareto(reports_of((1, 5.0), (2, 4.0), (3, 4.5), (4, 3.0)))
    (axes,) = figure.axes
    assert axes.get_ylabel() == "step time (s)"
    assert [text.get_text() for text in axes.texts] == ["1", "2", "3"]
    assert axes.collections[0].get_offsets()[:, 1].tolist() == [4.5]
    assert axes.lines[0].get_ydata().tolist() == [5.0, 4.0, 3.0]
    assert legend_of(figure) == [
        "beaten in time and memory", "front", "budget 80.0 MiB, off the right edge", "1  1, 5.0", "2  2, 4.0", "3  4, 3.0",
    ]  # fmt: skip
    assert (axes.get_xlim()[0], axes.get_ylim()[0]) == (0, 0)
    in_ms = draw_pareto(reports_of((1, 0.005), (2, 0.004))).axes[0]
    assert (in_ms.get_ylabel(), in_ms.lines[0].get_ydata().tolist()) == ("step time (ms)", [5.0, 4.0])
    assert len(legend_of(draw_pareto(reports_of(*((i, 50.0 - i) for i in range(1, 21)))))) == 2 + 14 + 1


def test_a_pareto_picture_needs_a_report() -> None:
    with pytest.raises(ValueError, match="draw_pareto needs at least one report; found none: pass a dictionary"):
        draw_pareto({})


def test_the_map_of_many_ranks_draws_the_first_or_the_given_ones() -> None:
    plan = plan_of(2, 4096)
    (axes,) = draw_holdings(plan).axes
    assert axes.get_title(loc="left").endswith("4096 ranks; 64 ranks are drawn")
    (axes,) = draw_holdings(plan, ranks=[0, 4095]).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "4095"]


@pytest.mark.slow
def test_pictures_are_saved(tmp_path: Path) -> None:
    draw_memory(report_of(plan_of(40)), path=tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"
    from matplotlib import pyplot

    assert not pyplot.get_fignums()


@pytest.mark.parametrize(("times", "width"), [(1, 0.3), (20, 0)])
def test_areas_have_edges_unless_the_edges_would_cover_them(times: int, width: float) -> None:
    figure = draw_memory(dataclasses.replace(REPORT, timeline=REPORT.timeline * times))
    assert {float(each) for layer in figure.axes[0].collections for each in layer.get_linewidth()} == {width}
