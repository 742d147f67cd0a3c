"""Run a graph with compiled regions, as ``Traced.compile`` does.

In reading order:

- ``regions``: cuts a graph into regions and ordinary calls.
- ``schedule``: the calls of a compiled step as Python code.
- ``binding``: all that together, and a compiled step for each size that comes.
"""

from __future__ import annotations

from funcshard.graph.compiling.binding import Backend, CompilingBind

__all__ = ["Backend", "CompilingBind"]
