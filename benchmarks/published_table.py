"""The tables of estimated against published memory and throughput, as Markdown and as errors."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.published_cases import Case, cases, configure, report_of, rows, tokens_per_second, unseen
from benchmarks.published_fit import KINDS, Fit, chance, fitted_rows, title
from benchmarks.published_loops import shares
from benchmarks.results import markdown
from funcshard.estimate import load_hardware

__all__ = ["Compared", "compare_memory", "compare_speed", "fit_table", "page"]

GIB = 2**30
HEADER = ["run", "published", "estimated", "error", "within"]
SPEED = "In tokens a second of one GPU, within 25 %."
CHANCE = (
    "The same fit on ten rows that are drawn at random, 300 times. Each cell is the median of these fits, and in "
    "parentheses their 5th and 95th percentiles. Errors are those of all rows that were not drawn. The last column is "
    "the share of draws whose worst error is at most 25 %."
)
BLIND = (
    "`benchmarks/published_unseen.json` holds the rows of llm-foundry's tables that the first file lacks, without those in "
    "float8. They were estimated once, after all rules and efficiencies had been fixed. A few of them stand above, as "
    "neighbours of the two slowest runs; no rule or number was chosen by them. The tables name each run whose error is "
    "over 15 %."
)


@dataclass(frozen=True, slots=True)
class Compared:
    """A published figure and the estimate of it.

    Attributes:
        case: the case.
        kind: the figure: ``"in use"``, ``"reserved"`` or ``"tokens/s"``.
        published: the published figure, in GiB or in tokens of a GPU in a second.
        low: the least that the estimate allows.
        high: the most.
    """

    case: Case
    kind: str
    published: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """How far the band lies above the published figure, or below it, relative to the figure."""
        nearest = min(max(self.published, self.low), self.high)
        return nearest / self.published - 1

    def row(self, limit: float) -> list[str]:
        """Return the cells of the table."""
        digits = 0 if self.kind == "tokens/s" else 1
        band = f"{self.low:.{digits}f}" + (f"–{self.high:.{digits}f}" if self.high > self.low else "")
        within = "yes" if abs(self.error) <= limit else "no"
        figure = f"{self.published:.{digits}f}" + (" reserved" if self.kind == "reserved" else "")
        return [title(self.case), figure, band, f"{100 * self.error:+.1f} %", within]


def compare_memory(case: Case) -> Compared:
    """Compare the memory of a case: in use with the peak, reserved with the reserved band."""
    report, kind = report_of(case), case.row["memory_kind"]
    if "reserved" in kind:
        low, high = report.reserved
        return Compared(case, "reserved", case.row["peak_gib"], low / GIB, high / GIB)
    return Compared(case, "in use", case.row["peak_gib"], report.peak / GIB, report.peak / GIB)


def compare_speed(case: Case) -> Compared:
    """Compare the tokens of one GPU in a second."""
    found = tokens_per_second(case)
    return Compared(case, "tokens/s", case.row["tps_per_gpu"], found, found)


def with_memory() -> list[Case]:
    """Return the cases with published memory."""
    return [case for case in cases() if case.row["peak_gib"]]


def fit_table() -> list[tuple[Case, float]]:
    """Return the peak of each case that is known to fit or not to fit, as a share of the device."""
    known = [case for case in cases() if case.row.get("outcome") in ("fits", "OOM")]
    return [(case, report_of(case).peak / load_hardware(case.hardware).memory) for case in known]


def statistics_of(found: Sequence[Compared]) -> str:
    """Return the median and the worst error in words."""
    errors = [abs(each.error) for each in found]
    return f"{len(errors)} rows: median error {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %"


def _chances(found: Sequence[Fit]) -> list[str]:
    """Return the cells of a row about fits on rows chosen at random."""

    def spread(values: Sequence[float], factor: float, digits: int) -> str:
        percentiles = statistics.quantiles(values, n=20, method="inclusive")
        low, middle, high = (f"{factor * percentiles[i]:.{digits}f}" for i in (0, 9, 18))
        return f"{middle} ({low}–{high})"

    worst = [max(each.rest) for each in found]
    return [
        spread([each.computing for each in found], 1, 2),
        spread([each.moving for each in found], 1, 2),
        spread([each.attention for each in found], 1, 2),
        spread([statistics.median(each.rest) for each in found], 100, 1) + " %",
        spread(worst, 100, 1) + " %",
        f"{100 * sum(each <= 0.25 for each in worst) / len(worst):.0f} %",
    ]


def _blind(progress: Callable[[str], None]) -> list[str]:
    """Return the paragraphs about the rows on which nothing is fitted or chosen."""
    parts = ["### A blind test", BLIND]
    own = unseen()
    for kind in KINDS:
        found = [compare_speed(case) for case in own if case.hardware in KINDS[kind]]
        if found:
            progress(f"unseen {kind}")
            worst = sorted(found, key=lambda each: -abs(each.error))
            lines = [each.row(0.25) for each in worst if abs(each.error) > 0.15]
            parts += [f"**{kind}, unseen**: {statistics_of(found)}.", markdown(HEADER, lines)]
    return parts


def page(progress: Callable[[str], None] = lambda text: None) -> str:
    """Return all tables as Markdown."""
    memory = [compare_memory(case) for case in with_memory()]
    progress("memory")
    parts = [
        "### Memory", f"In GiB a GPU, in use or reserved, within 15 %. {statistics_of(memory)}.",
        markdown(HEADER, [each.row(0.15) for each in memory]),
    ]  # fmt: skip
    outcomes = fit_table()
    progress("outcomes")
    wrong = [(case, share) for case, share in outcomes if (share <= 1) != (case.row["outcome"] == "fits")]
    named = [(case, share) for case, share in outcomes if "llm-foundry" not in case.row["source"] or (case, share) in wrong]
    foundry = [share for case, share in outcomes if "llm-foundry" in case.row["source"]]
    lines = [[title(case), case.row["outcome"], f"{100 * share:.0f} %"] for case, share in named]
    words = (
        f"The estimated peak as a share of the GPU's memory. {len(outcomes) - len(wrong)} of {len(outcomes)} outcomes "
        f"agree. All {len(foundry)} runs of llm-foundry that are compared fit, with at most {100 * max(foundry):.0f} %."
    )
    parts += [
        "### Fits or not",
        words,
        markdown(["run", "published", "estimated peak"], lines),
    ]
    parts += ["### Throughput", SPEED]
    drawn = []
    for kind in KINDS:
        fitted, rest = ([compare_speed(case) for case in chosen] for chosen in fitted_rows(kind))
        progress(kind)
        machine = load_hardware(KINDS[kind][0])
        share = shares().get(KINDS[kind][0], 1.0)
        triton = f", and Triton's attention {share:.2f} of the throughput of products" if share < 1 else ""
        words = (
            f"**{kind}**: products reach {machine.flops_efficiency:.2f} of the peak, other kernels "
            f"{machine.memory_efficiency:.2f} of the bandwidth{triton}. Fitted: {statistics_of(fitted)}. "
            f"The rest: {statistics_of(rest)}."
        )
        lines = [[*each.row(0.25), "yes" if each in fitted else ""] for each in [*fitted, *rest]]
        parts += [words, markdown([*HEADER, "fitted"], lines)]
        drawn.append([kind, *_chances(chance(kind))])
    parts += [
        "### Ten rows by chance", CHANCE,
        markdown(["GPU", "products", "other kernels", "Triton's attention", "median error", "worst", "worst ≤ 25 %"], drawn),
        *_blind(progress),
    ]  # fmt: skip
    reasons = Counter(why for why in map(configure, rows()) if isinstance(why, str))
    parts += [
        "### Rows left out", "Rows by the reason for which they are not compared:",
        markdown(["reason", "rows"], [[why, str(count)] for why, count in reasons.most_common()]),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"
