"""The walk through one training step, which counts its memory and its time.

In reading order:

- ``step``: the result, as data.
- ``runtime``: the buffers that funcshard or a peer holds.
- ``sizes``, ``ledger``: the bytes of a unit, and of a rank by category.
- ``lanes``: the clocks of computation and communication.
- ``simulator``: the walk itself.
"""

from __future__ import annotations

from funcshard.estimate.walk.lanes import HardwareClock
from funcshard.estimate.walk.runtime import OPTIMIZERS, OptimizerMemory, Runtime, check_runtime
from funcshard.estimate.walk.simulator import Simulation, simulate_step
from funcshard.estimate.walk.sizes import UnitSizes, sizes_by_unit
from funcshard.estimate.walk.step import CATEGORIES, LANES, Moment, Span, Step

__all__ = [
    "CATEGORIES", "HardwareClock", "LANES", "OPTIMIZERS", "Moment", "OptimizerMemory", "Runtime", "Simulation", "Span",
    "Step", "UnitSizes", "check_runtime", "simulate_step", "sizes_by_unit",
]  # fmt: skip
