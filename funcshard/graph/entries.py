"""``Entries``: the recordings of a traced step, and the one that serves some arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from funcshard.graph.signatures import Signature, nearest_difference
from funcshard.graph.step_graph import StepGraph


class Entry(NamedTuple):
    """A recording.

    Attributes:
        step_graph: the graph.
        run: the graph as a function.
    """

    step_graph: StepGraph
    run: Callable[..., list[Any]]


class Entries:
    """The recordings of a traced step, in the order in which they were made."""

    def __init__(self) -> None:
        self._entries: dict[Signature, Entry] = {}
        # Entries by the arguments that they served.
        self._served: dict[tuple[Signature, tuple[tuple[str, int], ...]], Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def last(self) -> Entry:
        """The recording that was made last."""
        return next(reversed(self._entries.values()))

    def add(self, entry: Entry) -> None:
        """Add a recording; it takes the place of one with its signature."""
        self._entries[entry.step_graph.signature] = entry
        self._served.clear()

    def find(self, signature: Signature, sizes: Mapping[str, int]) -> Entry | None:
        """Return the recording that serves arguments; ``None`` if none does.

        Arguments:
            signature: the facts about the arguments.
            sizes: the size of each named dim.
        """
        if not sizes:
            return self._entries.get(signature)
        key = signature, tuple(sizes.items())
        if key not in self._served:
            for entry_key, entry in self._entries.items():
                if entry_key._replace(
                    conditions=()
                ) == signature and not entry.step_graph.conditions.failing(sizes):
                    self._served[key] = entry
                    break
        return self._served.get(key)

    def difference(self, signature: Signature, sizes: Mapping[str, int]) -> str:
        """Return as text why no recording serves arguments; ``""`` if there is no recording."""
        alike = [
            entry
            for entry_key, entry in self._entries.items()
            if entry_key._replace(conditions=()) == signature
        ]
        if alike:
            failing = alike[-1].step_graph.conditions.failing(sizes)
            return f"found {sizes_text(sizes)}; the recording needs {failing}"
        return nearest_difference(signature, self._entries) if self._entries else ""


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Return sizes as text: ``b = 4, t = 16``."""
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())
