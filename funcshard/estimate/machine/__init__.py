"""Machines: their figures, and the times that follow from them.

In reading order:

- ``sources``: how far you can trust a number.
- ``hardware``: a machine as data; ``descriptions/`` ships with funcshard.
- ``timing``: the seconds of a collective, a computation and a copy.
- ``reference``, ``measuring``, ``calibration``: ``calibrate``, which measures this machine.
- ``reserved``: the memory that an allocator holds beside the memory in use.
"""

from __future__ import annotations

from funcshard.estimate.machine.calibration import calibrate
from funcshard.estimate.machine.hardware import Hardware, Link, hardware_names, load_hardware
from funcshard.estimate.machine.reference import Reference
from funcshard.estimate.machine.reserved import (
    RESERVED_RUNS,
    ReservedRun,
    reserved_band,
    reserved_how,
)
from funcshard.estimate.machine.sources import SOURCES, Source, source_of_sum, weakest
from funcshard.estimate.machine.timing import (
    Timed,
    collective_time,
    compute_time,
    offload_time,
    update_time,
)

__all__ = [
    "Hardware", "Link", "RESERVED_RUNS", "Reference", "ReservedRun", "SOURCES", "Source", "Timed", "calibrate",
    "collective_time", "compute_time", "hardware_names", "load_hardware", "offload_time", "reserved_band", "reserved_how",
    "source_of_sum", "update_time", "weakest",
]  # fmt: skip
