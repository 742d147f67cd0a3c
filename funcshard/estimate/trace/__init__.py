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
- ``program``: a tape, cut where the units of a plan act. ``stretches`` adds up folded modules.
- ``splicing``: the program of a plan with other units recomputed.
- ``profiling``: ``profile``, the front of all that.
- ``operators``: what an operator such as ``hvp`` does, by running it.
"""

from __future__ import annotations

from funcshard.estimate.trace.operators import OPERATORS, Held, Waited, trace_operator
from funcshard.estimate.trace.profiling import ModelCall, Profile, profile
from funcshard.estimate.trace.program import Memory, Program, Run, Work
from funcshard.estimate.trace.splicing import MARGIN, equal_units

__all__ = [
    "MARGIN", "OPERATORS", "Held", "Memory", "ModelCall", "Profile", "Program", "Run", "Waited", "Work", "equal_units",
    "profile", "trace_operator",
]  # fmt: skip
