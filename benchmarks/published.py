"""Compare estimates with the memory and the throughput that others have published.

python -m benchmarks.published --markdown docs/dev/estimates.md
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import results
from benchmarks.published_cases import UNSEEN, Case, cases, report_of, rows, tokens_per_second
from benchmarks.results import markdown
from funcshard.estimate import load_hardware

START, END = "<!-- published -->", "<!-- end of published -->"
GIB = 2**30
HEADER = ["run", "GPU", "figure", "published", "estimated", "error", "row"]


class Compared(NamedTuple):
    """A published figure, the band of its estimate, and whether the row is fitted on, known or unseen."""

    case: Case
    figure: str  # "GiB in use", "GiB reserved", "tokens/s" of a GPU, or "fits"
    published: float
    low: float
    high: float
    kind: str

    @property
    def error(self) -> float:
        """How far the band lies above the published figure, or below it, relative to the figure."""
        nearest = min(max(self.published, self.low), self.high)
        return nearest / self.published - 1

    def row(self) -> list[str]:
        """Return the cells of the table."""
        digits = 0 if self.figure == "tokens/s" else 1
        band = f"{self.low:.{digits}f}" + (f"–{self.high:.{digits}f}" if self.high > self.low else "")
        figures = [self.figure, f"{self.published:.{digits}f}", band, f"{100 * self.error:+.1f} %"]
        return [self.case.title, self.case.kind, *figures, self.kind]


def compare(case: Case, kind: str = "known") -> Iterator[Compared]:
    """Yield the comparisons of a case: memory in use, reserved memory, throughput."""
    if case.row.get("peak_gib"):
        report = report_of(case)
        figure = "GiB reserved" if "reserved" in case.row["memory_kind"] else "GiB in use"
        low, high = report.reserved if figure == "GiB reserved" else (report.peak, report.peak)
        yield Compared(case, figure, case.row["peak_gib"], low / GIB, high / GIB, kind)
    if case.row["tps_per_gpu"]:
        speed = tokens_per_second(case)
        yield Compared(case, "tokens/s", case.row["tps_per_gpu"], speed, speed, "fitted" if case.fitted else kind)


def page() -> str:
    """Return the table of all runs as Markdown, after medians of its parts."""
    compared = [each for case in cases() for each in compare(case)]
    compared += [each for case in cases(UNSEEN) for each in compare(case, "unseen")]
    parts: dict[tuple[str, ...], list[float]] = {}
    for each in compared:
        part = (each.case.kind, "tokens/s", each.kind) if each.figure == "tokens/s" else ("", "memory", each.kind)
        parts.setdefault(part, []).append(abs(each.error))
    medians = [
        [*part, str(len(errors)), f"{100 * statistics.median(errors):.1f} %", f"{100 * max(errors):.1f} %"]
        for part, errors in sorted(parts.items())
    ]
    reasons = Counter(row["left_out"] for row in rows() if "left_out" in row)
    return "\n\n".join([
        markdown(["GPU", "figure", "row", "rows", "median error", "worst"], medians),
        _outcomes(),
        markdown(HEADER, [each.row() for each in compared]),
        "Rows by the reason for which they aren't compared:",
        markdown(["reason", "rows"], [[why, str(count)] for why, count in reasons.most_common()]),
    ])  # fmt: skip


def _outcomes() -> str:
    """Return what is estimated of runs that are known to fit or not to fit."""
    known = [case for case in cases() if case.row.get("outcome")]
    fitting = {case: report_of(case).peak <= load_hardware(case.hardware).memory for case in known}
    wrong = [case.title for case in known if fitting[case] != (case.row["outcome"] == "fits")]
    words = f"{len(known) - len(wrong)} of {len(known)} runs that are known to fit, or not to fit, are estimated so"
    return f"{words}; not these: {'; '.join(wrong)}." if wrong else f"{words}."


def main() -> None:
    """Print the tables, and write them into a page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__.split("\n")[0])
    parser.add_argument("--markdown", type=Path, help="a page with markers for the tables")
    options = parser.parse_args()
    text = page()
    print(text)
    if options.markdown:
        results.put(options.markdown, START, END, f"\n{text}\n")


if __name__ == "__main__":
    main()
