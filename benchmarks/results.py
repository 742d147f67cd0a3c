"""Turn measured seconds and bytes into tables: medians, ratios, and their quartiles."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.peers import TITLES

__all__ = ["Spread", "check_losses", "markdown", "memory_table", "race_table", "ratio", "spread"]

FIRST, LATER = 1e-5, 1e-3  # accepted relative difference of losses: before the first update, and after it
REFERENCES = ("ddp", "fsdp2", "fsdp2_kept", "jax")
MEMORY = {"resident": "resident", "in_use": "in use"}


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


def check_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """Raise ``ValueError`` unless the losses of all peers are the same up to rounding.

    Of the peer without communication only the first loss is compared, because its ranks train alone
    after that.
    """
    reference = next((peer for peer in losses if not peer.startswith("none")), "none")
    for peer, found in losses.items():
        expected = losses[reference]
        if len(found) != len(expected):
            raise ValueError(f"{TITLES[peer]} took {len(found)} steps, {TITLES[reference]} {len(expected)}")
        for i, (a, b) in enumerate(zip(found[: 1 if peer.startswith("none") else None], expected, strict=False)):
            if not abs(a - b) <= (LATER if i else FIRST) * abs(b):
                raise ValueError(
                    f"{TITLES[peer]} computes something else than {TITLES[reference]}: in step {i} its loss is {a!r}, not "
                    f"{b!r}; times of different computations cannot be compared"
                )


def race_table(seconds: Mapping[str, Sequence[float]]) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of one race.

    Arguments:
        seconds: peer -> seconds of a step in each round.
    """
    against = [peer for peer in REFERENCES if peer in seconds]
    header = ["peer", "ms a step (quartiles)", *(f"÷ {TITLES[peer]}" for peer in against)]
    rows = []
    for peer, own in seconds.items():
        row = [TITLES[peer], spread(own).text(1, 1000)]
        row += ["" if other == peer else ratio(own, seconds[other]).text(2) for other in against]
        rows.append(row)
    return header, rows


def memory_table(peaks: Mapping[str, Mapping[str, int]]) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of the table of peak memory.

    Arguments:
        peaks: peer -> bytes of a process, ``resident`` and ``in_use``.
    """
    against = [peer for peer in ("fsdp2", "fsdp2_kept") if peer in peaks]
    header = ["peer"]
    for title in MEMORY.values():
        header += [f"MiB {title}", *(f"÷ {TITLES[peer]}" for peer in against)]
    rows = []
    for peer, own in peaks.items():
        row = [TITLES[peer]]
        for kind in MEMORY:
            row.append(f"{own[kind] / 2**20:.0f}")
            theirs = (0 if other == peer else peaks[other][kind] for other in against)
            row += [f"{own[kind] / it:.2f}" if it > 0 else "" for it in theirs]
        rows.append(row)
    return header, rows


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table as Markdown."""
    lines: list[Any] = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
