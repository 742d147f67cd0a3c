"""Run a graph with compiled regions, as ``Traced.compile`` does.

In reading order:

- ``regions``: cuts a graph into regions and ordinary calls.
- ``region_code``: a region as text and as a module.
- ``schedule``: the calls of a compiled step as Python code.
- ``by_size``: compiles a graph for any size for each size that comes.
- ``binding``: all that together.
"""

from __future__ import annotations

from funcshard.graph.compiling.binding import Backend, Compiled, CompilingBind
from funcshard.graph.compiling.schedule import CompiledRegion

__all__ = ["Backend", "Compiled", "CompiledRegion", "CompilingBind"]
