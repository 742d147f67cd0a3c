"""``StepDifference``: how two traced steps differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

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
                yield Bullets(heading, _shortened(heading_lines))
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
    listed_changes: list[str] = []
    unpaired: dict[tuple[str, str], list[int]] = defaultdict(list)  # places in that list
    for verb, other_verb, line in _edits(before, after):
        # Note: a line that is gone at one place and new at another one has moved.
        if places := unpaired[other_verb, line]:
            direction = "earlier" if verb == "gone" else "later"
            listed_changes[places.pop(0)] = f"{direction}: {line}"
        else:
            unpaired[verb, line].append(len(listed_changes))
            listed_changes.append(f"{verb}: {line}")
    return listed_changes


def _edits(before: Sequence[str], after: Sequence[str]) -> Iterable[tuple[str, str, str]]:
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    for kind, old_begin, old_end, new_begin, new_end in matcher.get_opcodes():
        if kind != "equal":
            yield from (("gone", "new", line) for line in before[old_begin:old_end])
            yield from (("new", "gone", line) for line in after[new_begin:new_end])


def _shortened(lines: Sequence[str]) -> list[str]:
    shown_lines = list(lines[:_MOST])
    if len(lines) > _MOST:
        shown_lines.append(f"and {len(lines) - _MOST} more")
    return shown_lines
