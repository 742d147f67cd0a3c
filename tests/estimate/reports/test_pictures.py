"""The pictures, measured on their axes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

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


@pytest.mark.slow
def test_the_stack_reaches_the_peak_and_starts_at_zero() -> None:
    figure = draw_memory(REPORT)
    (axes,) = figure.axes
    tops = [path.vertices[:, 1].max() for layer in axes.collections for path in layer.get_paths()]
    assert max(tops) == pytest.approx(REPORT.peak / MIB)
    assert axes.get_ylim()[0] == axes.get_xlim()[0] == 0
    assert axes.get_ylim()[1] > 24
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("time in the step", "memory of a rank (MiB)")
    assert axes.get_xlim()[1] == pytest.approx(REPORT.step_time)
    assert legend_of(figure) == [
        "gradients  2.0 MiB", "activations  12.0 MiB", "gathered  2.0 MiB", "inputs  64 B", "optimizer  2.2 MiB",
        "shards  1.1 MiB",
    ]  # fmt: skip
    assert axes.get_legend().get_title().get_text() == "peak 19.4 MiB (dot)\nin the backward of blocks.3\nbudget 24.0 MiB"


@pytest.mark.parametrize(("budget", "lines"), [(38, 2), (80, 1)])
def test_a_budget_far_above_the_peak_does_not_flatten_the_picture(budget: int, lines: int) -> None:
    (axes,) = draw_memory(dataclasses.replace(REPORT, budget=budget * MIB)).axes
    assert len(axes.lines) == lines  # the dot, and the budget
    assert axes.get_ylim()[1] == pytest.approx(1.05 * (budget if lines == 2 else REPORT.peak / MIB), rel=0.05)
    assert f"budget {budget}.0 MiB" in axes.get_legend().get_title().get_text()


def test_each_lane_has_its_spans() -> None:
    figure = draw_timeline(REPORT)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["compute", "gather", "reduce"]
    widths = [np.ptp(path.vertices[:, 0]) for bars in axes.collections for path in bars.get_paths()]
    assert sum(widths) == pytest.approx(sum(span.seconds for span in REPORT.spans))
    assert legend_of(figure) == ["forward", "backward", "all-gather", "reduce-scatter"]
    assert [text.get_text() for text in axes.texts][:4] == [f"blocks.{i}" for i in range(4)]


def test_a_part_of_the_step_can_be_drawn() -> None:
    (axes,) = draw_timeline(REPORT, begin=0.09, end=0.12).axes
    assert axes.get_xlim() == pytest.approx((0.09, 0.12))
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
    assert axes.get_ylabel() == "step time"
    assert [text.get_text() for text in axes.texts] == ["1", "2", "3"]
    assert axes.collections[0].get_offsets()[:, 1].tolist() == [5.0, 4.0, 4.5, 3.0]
    assert axes.lines[0].get_ydata().tolist() == [5.0, 4.0, 3.0]
    assert legend_of(figure) == [
        "all plans", "front", "1  1, 5.0", "2  2, 4.0", "3  4, 3.0",
    ]  # fmt: skip
    lowest, highest = axes.get_ylim()
    assert (5.0 - 3.0) / (highest - lowest) > 0.8
    assert len(legend_of(draw_pareto(reports_of(*((i, 50.0 - i) for i in range(1, 21)))))) == 3 + 14 + 1  # the budget too
    tight = {name: dataclasses.replace(report, budget=15 * MIB) for name, report in reports_of((1, 5.0), (2, 4.0)).items()}
    assert "budget 15.0 MiB" in legend_of(draw_pareto(tight))


def test_a_pareto_picture_needs_a_report() -> None:
    with pytest.raises(ValueError, match="draw_pareto needs at least one report; found none: pass a dictionary"):
        draw_pareto({})


def test_the_map_of_many_ranks_draws_the_first_or_the_given_ones() -> None:
    plan = plan_of(2, 4096)
    (axes,) = draw_holdings(plan).axes
    assert axes.get_xlabel() == "64 of 4096 ranks"
    (axes,) = draw_holdings(plan, ranks=[0, 4095]).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "4095"]


@pytest.mark.slow
def test_pictures_are_saved(tmp_path: Path) -> None:
    draw_memory(report_of(plan_of(40)), path=tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"
    from matplotlib import pyplot

    assert not pyplot.get_fignums()
