"""How far you can trust a number. Every number of a report and of a machine has a source:

- ``exact``: it follows from the plan alone.
- ``traced``: it comes from the trace of forward and backward.
- ``calibrated``: it comes from a measurement of such hardware.
- ``extrapolated``: it lies outside of that measurement.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from funcshard._utils.options import check_choice

SOURCES = ("exact", "traced", "calibrated", "extrapolated")

_SMALL = 0.05  # of a sum: smaller parts do not count


@dataclass(frozen=True, slots=True)
class Source:
    """Where a figure comes from.

    Attributes:
        text: a URL, or the words "measured by" and the command.
        how: ``"calibrated"`` for a measured or stated figure, ``"extrapolated"`` for one of another
            machine.
    """

    text: str
    how: str = "calibrated"

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip():
            raise ValueError(
                f"source must name where a figure comes from; found {self.text!r}: give a URL or a "
                "command"
            )
        check_choice("how", self.how, SOURCES)


def weakest(*sources: str) -> str:
    """Return the least trustworthy of some sources.

    Example:
        >>> weakest("exact", "extrapolated", "traced")
        'extrapolated'
    """
    return max(sources, key=SOURCES.index, default=SOURCES[0])


def source_of_sum(parts: Iterable[tuple[float, str]]) -> str:
    """Return the weakest source of a sum's parts, but for the least twentieth of the sum.

    Arguments:
        parts: the size and the source of each part.

    Example:
        >>> source_of_sum([(1000.0, "calibrated"), (1.0, "extrapolated")])
        'calibrated'
    """
    sizes = dict.fromkeys(SOURCES, 0.0)
    for size, source in parts:
        sizes[source] += size
    total, weaker = sum(sizes.values()), 0.0
    for source in reversed(SOURCES):
        weaker += sizes[source]
        if weaker > _SMALL * total:
            return source
    return SOURCES[0]
