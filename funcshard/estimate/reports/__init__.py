"""Reports: one step, two steps, or many, as tables, pictures and traces.

In reading order:

- ``report``: a step that prints itself as tables, also unit by unit.
- ``comparing``: two reports side by side, and many as one table.
- ``holding_map``: which rank holds which part of the parameters.
- ``pictures``: drawings.
"""

from __future__ import annotations

from funcshard.estimate.reports.comparing import Comparison, ReportTable, compare, tabulate
from funcshard.estimate.reports.holding_map import Holding, Holdings, holdings
from funcshard.estimate.reports.pictures import (
    draw_holdings,
    draw_memory,
    draw_pareto,
    draw_timeline,
    pareto_front,
)
from funcshard.estimate.reports.report import (
    Report,
    UnitUse,
    by_unit,
    left_text,
    memory_table,
    moment_text,
)

__all__ = [
    "Comparison", "Holding", "Holdings", "Report", "ReportTable", "UnitUse", "by_unit", "compare",
    "draw_holdings", "draw_memory", "draw_pareto", "draw_timeline", "holdings", "left_text", "memory_table", "moment_text",
    "pareto_front", "tabulate",
]  # fmt: skip
