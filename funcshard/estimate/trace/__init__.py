"""A model, traced once without data: the operations and the memory of forward and backward.

A trace becomes a tape, whose events belong to modules. A tape and the units of a plan become a
program. In reading order:

- ``tape``: the events of forward and backward as data; equal modules are in it once.
- ``tracing``: runs a model on fake tensors. ``recorder`` writes down what happens there, and
  ``leaves`` tells it of parameters.
- ``kernels``: the attention and the dropout that a GPU would choose.
- ``kinds``: finds modules that may be equal. ``folding`` keeps the events of one of them, and lets
  stubs represent the others.
- ``compiled``: the tensors that a compiler keeps, and the operations that it fuses.
- ``needs``: which units backward gathers, and in which order.
- ``program``: a tape, cut where the units of a plan act, also with other units recomputed.
  ``stretches`` adds up folded modules.
- ``profiling``: ``profile``, the front of all that.
"""

from __future__ import annotations

from funcshard.estimate.trace.profiling import Profile, once, profile
from funcshard.estimate.trace.program import MARGIN, Memory, Program, Run, Work, equal_units
from funcshard.estimate.trace.recorder import Frame, Recorder
from funcshard.estimate.trace.stretches import Counts, add_operation
from funcshard.estimate.trace.tape import Alloc, Free
from funcshard.estimate.trace.tape import Op as Operation
from funcshard.estimate.trace.tracing import ModelCall

__all__ = [
    "MARGIN", "Alloc", "Counts", "Frame", "Free", "Memory", "ModelCall", "Operation", "Profile", "Program", "Recorder",
    "Run", "Work", "add_operation", "equal_units", "once", "profile",
]  # fmt: skip
