"""``Entries``: the recordings of a traced step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from funcshard.graph.signatures import Signature, nearest_difference
from funcshard.graph.step_graph import StepGraph


class Entry(NamedTuple):
    """A recording, and its graph as a function."""

    step_graph: StepGraph
    run: Callable[..., list[Any]]


class Entries:
    """The recordings of a traced step, in the order of their making."""

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
        return next(reversed(self._entries.values()))

    def add(self, entry: Entry) -> None:
        """Add a recording, in place of one with its signature."""
        self._entries[entry.step_graph.signature] = entry
        # Why: the new recording may serve sizes for which an older one was found.
        self._served.clear()

    def find(self, signature: Signature, sizes: Mapping[str, int]) -> Entry | None:
        """Return the recording that serves arguments, or ``None``."""
        # Note: without names the arguments' own facts are the key, which is the fast way.
        if not sizes:
            return self._entries.get(signature)
        served_key = signature, tuple(sizes.items())
        if served_key not in self._served:
            for entry in self._alike(signature):
                if not entry.step_graph.conditions.failing(sizes):
                    self._served[served_key] = entry
                    break
        return self._served.get(served_key)

    def difference(self, signature: Signature, sizes: Mapping[str, int]) -> str:
        """Return why no recording serves arguments; ``""`` if there's no recording."""
        if entries := self._alike(signature):
            failing_rule = entries[-1].step_graph.conditions.failing(sizes)
            return f"found {sizes_text(sizes)}; the recording needs {failing_rule}"
        return nearest_difference(signature, self._entries) if self._entries else ""

    def _alike(self, signature: Signature) -> list[Entry]:
        """Return the recordings for a signature, whatever their sizes."""
        entries = self._entries.items()
        # Note: arguments have no conditions, so those of the recording don't count here.
        return [entry for key, entry in entries if key._replace(conditions=()) == signature]


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Return sizes as text, such as ``b = 4, t = 16``."""
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())
