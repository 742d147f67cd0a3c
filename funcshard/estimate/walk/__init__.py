"""The walk through one training step, which counts its memory and its time.

In reading order:

- ``runtime``: the buffers that funcshard or a peer holds, and the bytes of a unit.
- ``ledger``: the bytes of a rank by category.
- ``lanes``: the clocks of computation and communication.
- ``simulator``: the walk itself. ``operators``: that through an operator, such as ``hvp``.
"""

from __future__ import annotations

from funcshard.estimate.walk.lanes import LANES, HardwareClock, Span
from funcshard.estimate.walk.ledger import (
    CATEGORIES,
    RESERVED_RUNS,
    Moment,
    reserved_band,
    reserved_how,
)
from funcshard.estimate.walk.operators import simulate_operator
from funcshard.estimate.walk.runtime import (
    OPTIMIZERS,
    OptimizerMemory,
    Runtime,
    UnitSizes,
    sizes_by_unit,
)
from funcshard.estimate.walk.simulator import Simulation, simulate_step

__all__ = [
    "CATEGORIES", "HardwareClock", "LANES", "OPTIMIZERS", "Moment", "OptimizerMemory", "RESERVED_RUNS",
    "Runtime", "Simulation", "Span", "UnitSizes", "reserved_band", "reserved_how",
    "simulate_operator", "simulate_step", "sizes_by_unit",
]  # fmt: skip
