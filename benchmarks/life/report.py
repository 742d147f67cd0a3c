"""The table of the races, as text, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.life.racing import SIDES, Result
from benchmarks.results import Spread, ratio, spread

__all__ = ["HEADER", "as_json", "row"]

HEADER = ["what", "ranks", "peer", "ours", "theirs", "ratio (quartiles)", "of processor time", "goal", ""]


def row(result: Result) -> list[str]:
    """Return one row of the table."""
    case = result.case
    start = [case.title, str(result.ranks), case.peer]
    goal = "" if case.goal is None else f"≤ {case.goal:.2f}"
    if result.error:
        return [*start, "", "", "", "", goal, f"failed: {_shown(result.error)}"]
    ours, theirs = (_values(result, side) for side in SIDES)
    found = _ratio(ours, theirs)
    worked = [[turn.processor for turn in result.turns[side]] for side in SIDES]
    processor = f"{_ratio(*worked).median:.2f}" if case.measure == "seconds" else ""
    reached = "" if case.goal is None else "met" if found.median <= case.goal else "missed"
    amounts = [_amount(values, case.measure) for values in (ours, theirs)]
    return [*start, *amounts, found.text(2), processor, goal, reached]


def as_json(result: Result) -> dict[str, Any]:
    """Return everything measured in one race."""
    case = result.case
    kept = ("seconds", "processor", "bytes")
    turns = {side: [{key: getattr(turn, key) for key in kept} for turn in result.turns[side]] for side in SIDES}
    return {"name": case.name, "ranks": result.ranks, "goal": case.goal, "error": result.error, **turns}


def _values(result: Result, side: str) -> list[float]:
    return [getattr(turn, result.case.measure) for turn in result.turns[side]]


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    if not all(theirs):  # nothing was measured
        return Spread(float("nan"), float("nan"), float("nan"))
    return ratio(ours, theirs)


def _amount(values: Sequence[float], measure: str) -> str:
    median = spread(values).median
    return f"{median / 2**20:.1f} MiB" if measure == "bytes" else f"{1000 * median:.1f} ms"


def _shown(error: str) -> str:
    """Return the last line of an error, in a form that fits a table."""
    return error.strip().splitlines()[-1].replace("|", "/")[:200]
