"""Run a graph with compiled regions, as ``Traced.compile`` does.

In reading order:

- ``regions``: cuts a graph into regions and ordinary calls.
- ``binding``: compiles the regions and calls them, and makes a step for each size that comes.
"""

from __future__ import annotations

from funcshard.graph.compiling.binding import Backend, CompilingBind

__all__ = ["Backend", "CompilingBind"]
