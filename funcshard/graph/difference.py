"""``StepDifference``: how two traced steps differ, as text and as HTML."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import fx

from funcshard._utils import Bullets, Part, Shown, Table, table
from funcshard.graph.memory import memory_of
from funcshard.graph.show import line_without_names
from funcshard.graph.step_graph import STARTS, StepGraph

_MOST = 40  # lines of a list
_KINDS = {
    "all_gather": "gathers", "reduce_scatter": "reduce-scatters", "all_reduce": "all-reduces", "broadcast": "broadcasts",
    "all_to_all": "all-to-alls",
}  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class StepDifference(Shown):
    """How a traced step differs from another one; ``print`` shows it.

    A line names a collective or an operation, and says whether it is new or gone, or runs earlier
    or later among those that stay. Equal lines that follow each other are one line.

    Attributes:
        before: the first step.
        after: the second step.
        collectives: the lines of collectives.
        operations: the lines of other operations.
    """

    before: StepGraph
    after: StepGraph
    collectives: tuple[str, ...]
    operations: tuple[str, ...]

    @classmethod
    def of(cls, before: StepGraph, after: StepGraph) -> StepDifference:
        """Return how two graphs differ."""
        changes = _changes(_lines(before.graph), _lines(after.graph))
        parts: tuple[list[str], list[str]] = [], []
        for change in changes:
            parts[change.partition(": ")[2][0] not in "→←"].append(change)
        return cls(before, after, *map(tuple, parts))

    def _parts(self) -> Iterable[Part]:
        rows = [*_collective_rows(self.before, self.after), *_memory_rows(self)]
        yield Table("Two steps", ["what", "before", "after"], rows)
        for heading, lines in (("Collectives", self.collectives), ("Operations", self.operations)):
            yield (
                Bullets(heading, _folded(lines))
                if lines
                else f"{heading}: the same, in the same order."
            )


def _collective_rows(before: StepGraph, after: StepGraph) -> Iterable[list[str]]:
    for collective_kind in STARTS:
        cells = []
        for step_graph in (before, after):
            event_bytes = [
                event.bytes for event in step_graph.events if event.kind == collective_kind
            ]
            cells.append(
                f"{len(event_bytes)} of {table.size(sum(event_bytes))}" if event_bytes else "none"
            )
        if cells != ["none", "none"]:
            yield [_KINDS[collective_kind], *cells]


def _memory_rows(difference: StepDifference) -> list[list[str]]:
    memory_before, memory_after = memory_of(difference.before), memory_of(difference.after)
    rows = [
        ("peak", memory_before.peak, memory_after.peak),
        ("peak gathered", memory_before.peak_gathered, memory_after.peak_gathered),
    ]
    return [[row_title, table.size(first), table.size(second)] for row_title, first, second in rows]


def _lines(graph: fx.Graph) -> list[str]:
    return [
        line_without_names(node) for node in graph.nodes if node.op not in ("placeholder", "output")
    ]


def _changes(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the lines that one of two lists lacks, and those that are elsewhere, in order."""
    places: dict[str, list[int]] = defaultdict(list)
    for line_index, line in enumerate(after):
        places[line].append(line_index)
    pairs: list[tuple[int, int]] = []
    listed_changes: list[tuple[float, str]] = []
    count: Counter[str] = Counter()
    for line_index, line in enumerate(before):
        if count[line] < len(places[line]):
            pairs.append((line_index, places[line][count[line]]))
        else:
            listed_changes.append((line_index, f"gone: {line}"))
        count[line] += 1
    scale = len(before) / max(len(after), 1)
    listed_changes += [
        (line_index * scale, f"new: {line}")
        for line, line_places in places.items()
        for line_index in line_places[count[line] :]
    ]
    kept = _longest_rise([second for _, second in pairs])
    latest = -1
    for first, second in pairs:
        if second in kept:
            latest = second
        else:
            listed_changes.append(
                (first, f"{'earlier' if second < latest else 'later'}: {before[first]}")
            )
    return [line for _, line in sorted(listed_changes, key=lambda each: each[0])]


def _longest_rise(numbers: Sequence[int]) -> set[int]:
    """Return the members of a longest rising subsequence of different numbers."""
    ends: list[int] = []  # the smallest end of a rise of each length
    node_before: dict[int, int | None] = {}
    for node_index in numbers:
        place = bisect_left(ends, node_index)
        node_before[node_index] = ends[place - 1] if place else None
        ends[place : place + 1] = [node_index]
    rising_nodes: set[int] = set()
    last = ends[-1] if ends else None
    while last is not None:
        rising_nodes.add(last)
        last = node_before[last]
    return rising_nodes


def _folded(lines: Sequence[str]) -> list[str]:
    """Return lines with those that repeat as one, and no more than can be read."""
    folded_lines = []
    for line, same in groupby(lines):
        same_count = len(list(same))
        word, _, line_rest = line.partition(": ")
        folded_lines.append(line if same_count == 1 else f"{word}: {same_count} × {line_rest}")
    more_lines = len(folded_lines) - _MOST
    return folded_lines if more_lines <= 0 else [*folded_lines[:_MOST], f"and {more_lines} more"]
