"""Reports: one step, two steps, or many, as tables, pictures and traces.

In reading order:

- ``report``, ``unit_use``: a step that prints itself as tables, and the same unit by unit.
- ``comparing``, ``differences``: two reports side by side.
- ``tabulating``: many reports as one table.
- ``holding_map``: which rank holds which part of the parameters.
- ``pictures``, ``perfetto``: drawings, and trace files.
"""

from __future__ import annotations

from funcshard.estimate.reports.comparing import Comparison, UnitPair, compare
from funcshard.estimate.reports.holding_map import Held, Holding, Holdings, holdings
from funcshard.estimate.reports.pictures import (
    draw_holdings,
    draw_memory,
    draw_pareto,
    draw_timeline,
    pareto_front,
)
from funcshard.estimate.reports.report import Report, left_text, memory_table, moment_text
from funcshard.estimate.reports.tabulating import ReportTable, tabulate
from funcshard.estimate.reports.unit_use import UnitUse, by_unit

__all__ = [
    "Comparison", "Held", "Holding", "Holdings", "Report", "ReportTable", "UnitPair", "UnitUse", "by_unit", "compare",
    "draw_holdings", "draw_memory", "draw_pareto", "draw_timeline", "holdings", "left_text", "memory_table", "moment_text",
    "pareto_front", "tabulate",
]  # fmt: skip
