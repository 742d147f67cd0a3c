"""Compare simulated peaks with the measured ones of ``memory_truth``, case by case."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.memory_truth import CASES, Setup, measure, prepare

__all__ = ["Comparison", "compare", "markdown", "rows"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A case, its measured peak and the peak that a simulation says.

    Attributes:
        name: name of the case.
        measured: bytes.
        simulated: bytes.
    """

    name: str
    measured: int
    simulated: int

    @property
    def error(self) -> float:
        """The simulated peak, relative to the measured one, minus 1."""
        return self.simulated / self.measured - 1


def compare(
    simulate: Callable[[Setup], int],
    cases: Iterable[str] = (),
    *,
    measured: Mapping[str, int] | None = None,
) -> list[Comparison]:
    """Compare simulated peaks with measured ones.

    Arguments:
        simulate: returns the peak of the second step, in bytes on the mesh's device.
        cases: names of cases; by default all.
        measured: the measured peaks, by name of the case; by default they are measured now.
    """
    found = []
    for name in cases or CASES:
        peak = measure(CASES[name]).peak if measured is None else measured[name]
        found.append(Comparison(name, peak, simulate(prepare(CASES[name]))))
    return found


def rows(comparisons: Iterable[Comparison]) -> list[list[str]]:
    """Return the cells of a table: case, measured, simulated, error."""
    return [[c.name, f"{c.measured:,}", f"{c.simulated:,}", f"{100 * c.error:+.2f} %"] for c in comparisons]


def markdown(comparisons: Sequence[Comparison]) -> str:
    """Return a table of errors in Markdown: of each model and strategy, the median and the worst."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for each in comparisons:
        case = CASES[each.name]
        groups.setdefault((case.model, case.strategy), []).append(each)
    lines = [
        "| model | strategy | cases | median error | worst error | worst case |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for (model, strategy), group in groups.items():
        worst = max(group, key=lambda each: abs(each.error))
        median = statistics.median(abs(each.error) for each in group)
        options = worst.name.removeprefix(f"{model} {strategy}").strip() or "as usual"
        cells = [model, f"`{strategy}`", str(len(group)), f"{100 * median:.2f} %", f"{100 * worst.error:+.2f} %", options]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
