"""A training step as one graph, which you can look at, change, and run in place of the step.

In reading order:

- ``step_graph``: the graph, as data. ``recording`` makes it on tensors without data.
- ``memory``: which operations share memory, what a run takes, and the sections.
- ``tidying``, ``show``: simplify, print and compare graphs.
- ``replay``: runs a graph on the groups of a mesh.
- ``signatures``: the arguments that a graph serves.
- ``effects``: the order that operations need, and whether a changed graph has it.
- ``traced``: ``trace``, and the recordings of a step. ``saving``, ``loading``: graphs in files.
- ``passes``: functions from a traced step to a traced step. ``compiling``: compiled regions.
"""

from __future__ import annotations

from funcshard.graph import passes
from funcshard.graph.loading import load_traced
from funcshard.graph.memory import StepCost, StepMemory
from funcshard.graph.step_graph import StepGraph
from funcshard.graph.traced import Traced, trace

__all__ = [
    "StepCost",
    "StepGraph",
    "StepMemory",
    "Traced",
    "load_traced",
    "passes",
    "trace",
]
