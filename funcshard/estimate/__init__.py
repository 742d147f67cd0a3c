"""Estimates of a step before you run it: memory, time, traffic, and the best plan.

A model is traced once into a profile. A plan and a profile then give a report. Read in this order:

- ``machine``: machines, and the times that follow from them.
- ``trace``: a model's operations and memory.
- ``walk``: the walk through a step, which counts memory and time.
- ``reports``: the result as tables, pictures and traces.
- ``estimating``: ``estimate``, which puts these four together.
- ``search``: ``auto_plan``, the best plan under a budget.
"""

from funcshard.estimate.estimating import estimate
from funcshard.estimate.machine import (
    Hardware,
    Link,
    Source,
    calibrate,
    collective_time,
    hardware_names,
    load_hardware,
)
from funcshard.estimate.reports import (
    Comparison,
    Holdings,
    Report,
    compare,
    draw_holdings,
    draw_memory,
    draw_pareto,
    draw_timeline,
    holdings,
    memory_table,
    tabulate,
)
from funcshard.estimate.search import (
    Best,
    Change,
    Infeasible,
    Space,
    auto_plan,
    changes_to_fit,
)
from funcshard.estimate.trace import Profile, profile
from funcshard.estimate.walk import (
    OPTIMIZERS,
    OptimizerMemory,
    Runtime,
    reserved_band,
)

__all__ = [
    "OPTIMIZERS", "Best", "Change", "Comparison", "Hardware", "Holdings", "Infeasible", "Link", "OptimizerMemory", "Profile",
    "Report", "Runtime", "Source", "Space", "auto_plan", "calibrate", "changes_to_fit", "collective_time", "compare",
    "draw_holdings", "draw_memory", "draw_pareto", "draw_timeline", "estimate", "hardware_names", "holdings",
    "load_hardware", "memory_table", "profile", "reserved_band", "tabulate",
]  # fmt: skip
