"""Estimates of a step before it runs: its memory, its time, its traffic, and the best plan.

A model is traced once into a profile. A plan and a profile then give a report. Read in this order:

- ``step``, ``report``: the result, as data; and ``Report``, which shows it.
- ``tape``: the memory and operations of one forward and backward, in order, as data.
- ``recorder``: writes down what torch runs. ``kinds``: which modules are alike. ``folding``: keeps
  the events of modules that are alike once. ``tracing``: runs the model without data.
- ``program``: a tape as the units of a plan see it.
- ``profiling``: ``profile``, the front of all that.
- ``hardware``, ``timing``: descriptions of machines, and the times that follow from them.
  ``calibration``: ``calibrate``, which measures this machine.
- ``sizes``: the bytes of a unit's buffers. ``ledger``: the memory of a rank, by category.
- ``runtime``: the buffers that funcshard or a peer holds. ``reserved``: the memory that an
  allocator adds. ``compiled``: the tensors that a compiler keeps, and the operations it fuses.
- ``lanes``: the clocks of computation and communication. ``simulator``: walks through a step.
  ``estimating``: ``estimate``, the front of it.
- ``show``, ``unit_use``: a report as tables, and unit by unit. ``comparing``, ``changes``: two
  reports side by side, and the differences between their plans.
- ``tabulating``: many reports as one table. ``holding_map``: which rank holds which part.
  ``pictures``: reports and holdings, drawn. ``perfetto``: a report as a trace file.
- ``space``: the plans that a search tries. ``splicing``, ``scoring``: their scores. ``search``:
  ``auto_plan``. ``infeasible``: the reason if nothing fits, and the price of each change.
"""

from funcshard.estimate.calibration import calibrate
from funcshard.estimate.comparing import Comparison, UnitPair, compare
from funcshard.estimate.estimating import OPTIMIZERS, estimate
from funcshard.estimate.hardware import Hardware, Link, Source, hardware_names, load_hardware
from funcshard.estimate.holding_map import Held, Holding, Holdings, holdings
from funcshard.estimate.infeasible import Change, Infeasible, changes_to_fit
from funcshard.estimate.pictures import draw_holdings, draw_memory, draw_pareto, draw_timeline, pareto_front
from funcshard.estimate.profiling import Profile, profile
from funcshard.estimate.report import CATEGORIES, LANES, SOURCES, Moment, Report, Span
from funcshard.estimate.reserved import RESERVED_RUNS, ReservedRun, reserved_band
from funcshard.estimate.runtime import OptimizerMemory, Runtime
from funcshard.estimate.search import Best, Point, auto_plan
from funcshard.estimate.space import Space
from funcshard.estimate.tabulating import ReportTable, tabulate
from funcshard.estimate.timing import Timed, collective_time, compute_time, offload_time, weakest
from funcshard.estimate.unit_use import UnitUse, by_unit

__all__ = [
    "CATEGORIES", "LANES", "OPTIMIZERS", "RESERVED_RUNS", "SOURCES", "Best", "Change", "Comparison", "Hardware", "Held",
    "Holding", "Holdings", "Infeasible", "Link", "Moment", "OptimizerMemory", "Point", "Profile", "Report", "ReportTable",
    "ReservedRun", "Runtime", "Source", "Space", "Span", "Timed", "UnitPair", "UnitUse", "auto_plan", "by_unit",
    "calibrate", "changes_to_fit", "collective_time", "compare", "compute_time", "draw_holdings", "draw_memory",
    "draw_pareto", "draw_timeline", "estimate", "hardware_names", "holdings", "load_hardware", "offload_time",
    "pareto_front", "profile", "reserved_band", "tabulate", "weakest",
]  # fmt: skip
