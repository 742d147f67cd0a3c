"""Machines: their figures, and the times that follow from them.

In reading order:

- ``hardware``: a machine as data, and how far you can trust a number; ``descriptions/`` ships with
  funcshard.
- ``timing``: the seconds of a collective, a computation and a copy.
- ``calibration``: ``calibrate``, which measures this machine.
"""

from __future__ import annotations

from funcshard.estimate.machine.calibration import Reference, calibrate
from funcshard.estimate.machine.hardware import (
    SOURCES,
    Hardware,
    Link,
    Source,
    hardware_names,
    load_hardware,
    source_of_sum,
    weakest,
)
from funcshard.estimate.machine.timing import (
    Timed,
    collective_time,
    compute_time,
    offload_time,
    update_time,
)

__all__ = [
    "Hardware", "Link", "Reference", "SOURCES", "Source", "Timed", "calibrate",
    "collective_time", "compute_time", "hardware_names", "load_hardware", "offload_time",
    "source_of_sum", "update_time", "weakest",
]  # fmt: skip
