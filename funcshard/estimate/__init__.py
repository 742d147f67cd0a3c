"""Estimates of a step before it runs: its memory, its time, its traffic, and the best plan.

A model is traced once into a profile. A plan and a profile then give a report. Read in this order:

- ``machine``: descriptions of machines, and the times that follow from them.
- ``trace``: a model, traced once: its operations and its memory.
- ``walk``: the walk through a step, which counts memory and time.
- ``reports``: the result as tables, pictures and traces; two results side by side.
- ``estimating``: ``estimate``, which puts these four together.
- ``search``: ``auto_plan``, the best plan under a budget.
"""

from funcshard.estimate.estimating import estimate
from funcshard.estimate.machine import (
    RESERVED_RUNS,
    SOURCES,
    Hardware,
    Link,
    ReservedRun,
    Source,
    Timed,
    calibrate,
    collective_time,
    compute_time,
    hardware_names,
    load_hardware,
    offload_time,
    reserved_band,
    weakest,
)
from funcshard.estimate.reports import (
    Comparison,
    Held,
    Holding,
    Holdings,
    Report,
    ReportTable,
    UnitPair,
    UnitUse,
    by_unit,
    compare,
    draw_holdings,
    draw_memory,
    draw_pareto,
    draw_timeline,
    holdings,
    pareto_front,
    tabulate,
)
from funcshard.estimate.search import (
    Best,
    Change,
    Infeasible,
    Point,
    Space,
    auto_plan,
    changes_to_fit,
)
from funcshard.estimate.trace import Profile, profile
from funcshard.estimate.walk import (
    CATEGORIES,
    LANES,
    OPTIMIZERS,
    Moment,
    OptimizerMemory,
    Runtime,
    Span,
)

__all__ = [
    "CATEGORIES", "LANES", "OPTIMIZERS", "RESERVED_RUNS", "SOURCES", "Best", "Change", "Comparison", "Hardware", "Held",
    "Holding", "Holdings", "Infeasible", "Link", "Moment", "OptimizerMemory", "Point", "Profile", "Report", "ReportTable",
    "ReservedRun", "Runtime", "Source", "Space", "Span", "Timed", "UnitPair", "UnitUse", "auto_plan", "by_unit",
    "calibrate", "changes_to_fit", "collective_time", "compare", "compute_time", "draw_holdings", "draw_memory",
    "draw_pareto", "draw_timeline", "estimate", "hardware_names", "holdings", "load_hardware", "offload_time",
    "pareto_front", "profile", "reserved_band", "tabulate", "weakest",
]  # fmt: skip
