"""``Report``: the memory, the time and the traffic of one training step, with tables and files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from funcshard._utils import Part, Shown
from funcshard.estimate.reports.perfetto import to_perfetto
from funcshard.estimate.reports.show import binds_text, report_parts
from funcshard.estimate.walk import Step


@dataclass(frozen=True, slots=True, repr=False)
class Report(Shown, Step):
    """The memory, the time and the traffic of one training step; made by ``estimate``.

    ``print`` and notebooks show it as tables. ``Step`` lists its fields.
    """

    @property
    def binds(self) -> str:
        """Sentence that says which resource limits the step: memory, communication or compute."""
        return binds_text(self)

    def to_perfetto(self, path: str | Path) -> Path:
        """Write a trace for Perfetto or ``chrome://tracing``, and return the file's path.

        Arguments:
            path: the file to write, ``.json``.
        """
        return to_perfetto(self, path)

    def _parts(self) -> Iterator[Part]:
        return report_parts(self)
