"""``StepDifference``: how two traced steps differ."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import fx

from funcshard._utils import table
from funcshard._utils.table import Bullets, Part, Shown, Table
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
    """How a traced step differs from another one, for you to print."""

    before: StepGraph
    after: StepGraph
    collectives: tuple[str, ...]
    operations: tuple[str, ...]

    @classmethod
    def of(cls, before: StepGraph, after: StepGraph) -> StepDifference:
        """Return how two graphs differ."""
        change_parts: tuple[list[str], list[str]] = [], []
        for change in _changes(_lines(before.graph), _lines(after.graph)):
            _, _, line = change.partition(": ")
            change_parts[line[0] not in "→←"].append(change)
        return cls(before, after, *map(tuple, change_parts))

    def _parts(self) -> Iterable[Part]:
        rows = [*_collective_rows(self.before, self.after), *_memory_rows(self.before, self.after)]
        yield Table("Two steps", ["what", "before", "after"], rows)
        for heading, heading_lines in (
            ("Collectives", self.collectives),
            ("Operations", self.operations),
        ):
            if heading_lines:
                yield Bullets(heading, _folded(heading_lines))
            else:
                yield f"{heading}: the same, in the same order."


def _collective_rows(*step_graphs: StepGraph) -> Iterable[list[str]]:
    for kind in STARTS:
        kind_sizes = [[e.bytes for e in graph.events if e.kind == kind] for graph in step_graphs]
        if any(kind_sizes):
            cells = [
                f"{len(part)} of {table.size(sum(part))}" if part else "none" for part in kind_sizes
            ]
            yield [_KINDS[kind], *cells]


def _memory_rows(*step_graphs: StepGraph) -> Iterable[list[str]]:
    memories = list(map(memory_of, step_graphs))
    yield ["peak", *(table.size(memory.peak) for memory in memories)]
    yield ["peak gathered", *(table.size(memory.peak_gathered) for memory in memories)]


def _lines(graph: fx.Graph) -> list[str]:
    nodes = (node for node in graph.nodes if node.op not in ("placeholder", "output"))
    return list(map(line_without_names, nodes))


def _changes(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the lines that are new, gone, earlier or later, in order."""
    new_places: dict[str, list[int]] = defaultdict(list)
    for place, line in enumerate(after):
        new_places[line].append(place)
    moves: list[tuple[int, int]] = []  # of a line that stays, the places before and after
    listed_changes: list[tuple[float, str]] = []
    for place, line in enumerate(before):
        if new_places[line]:
            # Note: the first of several equal lines is paired with the first one, and so on.
            moves.append((place, new_places[line].pop(0)))
        else:
            listed_changes.append((place, f"gone: {line}"))
    # Why scaled: a new line is listed among those that ran at the same time of the step.
    place_scale = len(before) / max(len(after), 1)
    for line, line_places in new_places.items():
        listed_changes += [(place * place_scale, f"new: {line}") for place in line_places]
    # Why: a line is earlier or later with respect to the most lines that keep their order.
    in_order = _longest_rise([new_place for _, new_place in moves])
    latest_place = -1
    for place, new_place in moves:
        if new_place in in_order:
            latest_place = new_place
        else:
            move_direction = "earlier" if new_place < latest_place else "later"
            listed_changes.append((place, f"{move_direction}: {before[place]}"))
    return [line for _, line in sorted(listed_changes, key=lambda change: change[0])]


def _longest_rise(numbers: Sequence[int]) -> set[int]:
    rise_ends: list[int] = []  # the smallest end of a rise of each length
    number_before: dict[int, int | None] = {}
    for number in numbers:
        length = bisect_left(rise_ends, number)
        number_before[number] = rise_ends[length - 1] if length else None
        # Note: patience sorting; the slice appends if no rise of this length has ended yet.
        rise_ends[length : length + 1] = [number]
    rising_numbers = set()
    last_number = (*rise_ends[-1:], None)[0]
    while last_number is not None:
        rising_numbers.add(last_number)
        last_number = number_before[last_number]
    return rising_numbers


def _folded(lines: Sequence[str]) -> list[str]:
    """Return lines with equal neighbours as one, and at most ``_MOST`` of them."""
    folded_lines = []
    for line, equal_lines in groupby(lines):
        line_count = len(list(equal_lines))
        folded_lines.append(
            line if line_count == 1 else line.replace(": ", f": {line_count} × ", 1)
        )
    if len(folded_lines) > _MOST:
        folded_lines[_MOST:] = [f"and {len(folded_lines) - _MOST} more"]
    return folded_lines
