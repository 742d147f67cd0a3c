"""A training step as one graph, which you can look at, change, and run in place of the step.

In reading order:

- ``step_graph``: the graph, as data. ``recording`` makes it on tensors without data.
- ``storages``, ``memory``, ``cost``: which operations share memory, and what a run takes.
- ``tidying``, ``sections``, ``show``, ``difference``: simplify, divide, print and compare graphs.
- ``replay``: runs a graph on the groups of a mesh.
- ``signatures``, ``named_sizes``: the arguments that a graph serves. ``filling``: forms of results.
- ``saving``, ``loading``: graphs in files.
- ``entries``: the recordings of a step. ``traced``: ``trace``, the front of all that.
- ``effects``, ``checking``: the order that operations need, and whether a changed graph has it.
- ``passes``: functions from a traced step to a traced step. ``compiling``: compiled regions.
"""

from __future__ import annotations

from funcshard.graph import passes
from funcshard.graph.cost import StepCost
from funcshard.graph.loading import load_traced
from funcshard.graph.memory import StepMemory
from funcshard.graph.step_graph import StepGraph
from funcshard.graph.traced import Traced, trace

__all__ = ["StepCost", "StepGraph", "StepMemory", "Traced", "load_traced", "passes", "trace"]
