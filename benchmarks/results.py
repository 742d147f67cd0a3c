"""Turn measured seconds and bytes into tables: medians, ratios, and their quartiles."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from funcshard._utils.table import Table as TextTable

T = TypeVar("T")


class Spread(NamedTuple):
    """A median and its quartiles."""

    median: float
    low: float
    high: float

    def text(self, digits: int, factor: float = 1.0) -> str:
        """Return ``median (low–high)``."""
        median, low, high = (f"{factor * x:.{digits}f}" for x in self)
        return f"{median} ({low}–{high})"


def spread(values: Sequence[float]) -> Spread:
    """Return the median and quartiles of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the ratio of the two medians, with the quartiles of the ratios within each round.

    Both peers of a round ran under the same conditions, so a disturbance of the machine does not
    change its ratio.
    """
    rounds = spread([a / b for a, b in zip(ours, theirs, strict=True)])
    return Spread(statistics.median(ours) / statistics.median(theirs), rounds.low, rounds.high)


class Table(NamedTuple):
    """A table of text; ``_asdict`` is its JSON."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def show(self) -> None:
        """Print the table."""
        print(f"\n{TextTable(*self)}", flush=True)

    def page(self) -> str:
        """Return the title and the table as Markdown."""
        return f"**{self.title}**\n\n{markdown(self.header, self.rows)}\n"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table as Markdown."""
    lines: list[Any] = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def put(file: Path, start: str, end: str, text: str) -> None:
    """Write text between two lines of a page, which has to have them."""
    before, found, rest = file.read_text(encoding="utf-8").partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{file} must have the lines {start} and {end}, between which the tables go: add them")
    file.write_text(f"{before}{start}\n{text}\n{end}{after}", encoding="utf-8")


def machine() -> dict[str, str]:
    """Return the facts about this machine that the numbers depend on."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return {
        "processor": names[0].partition(":")[2].strip() if names else platform.processor() or "unknown",
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def about() -> str:
    """Return the facts about this machine in one line."""
    return ", ".join(f"{key} {value}" for key, value in machine().items())


def progress(items: Iterable[T], what: str) -> Iterator[T]:
    """Yield ``items``, and say on the standard error that they begin."""
    print(f"{what} …", file=sys.stderr, flush=True)
    yield from items
