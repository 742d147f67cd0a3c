"""A training step as one graph, which you can look at, change, and run in place of the step.

In reading order:

- ``step_graph``: the graph of one step, as data.
- ``recording``: runs a step on tensors without data, and records its operations.
- ``storages``: which operations share memory, and when it's free.
- ``tidying``: takes operations out that do nothing; adds and replaces nodes.
- ``replay``: runs a graph on the groups of a mesh.
- ``memory``: the bytes that a run holds. ``cost``: the work that it does.
- ``sections``: which part of the step an operation is. ``show``: a graph as text and as HTML.
- ``difference``: how two steps differ.
- ``signatures``: the facts about arguments that a graph depends on, and how two of them differ.
- ``named_sizes``: the sizes of a batch that may change. ``filling``: the forms of all results.
- ``saving``: graphs in files. ``loading``: ``load_traced``, which reads them.
- ``entries``: the recordings of a step.
- ``traced``: ``trace``, the front of all that, and ``Traced``.
- ``effects``: the order that operations need. ``checking``: whether a changed graph may run.
- ``passes``: functions from a traced step to a traced step. ``compiling``: runs what lies between
  collectives compiled.
"""

from __future__ import annotations

from funcshard.graph import passes
from funcshard.graph.cost import StepCost
from funcshard.graph.loading import load_traced
from funcshard.graph.memory import StepMemory
from funcshard.graph.step_graph import StepGraph
from funcshard.graph.traced import Traced, trace

__all__ = ["StepCost", "StepGraph", "StepMemory", "Traced", "load_traced", "passes", "trace"]
