"""A region as code: its text, which is equal for equal regions, and a module that runs it."""

from __future__ import annotations

from typing import Any

from torch import fx

from funcshard.graph.compiling.regions import Cut, Region, writes


def region_graph(region: Region, cut: Cut) -> fx.Graph:
    """Return a region as a graph from its inputs to the list of its outputs."""
    graph, inside = fx.Graph(), set(region.nodes)
    copies: dict[fx.Node, fx.Node] = {}
    for input_index, node in enumerate(region.inputs):
        copies[node] = graph.placeholder(f"in{input_index}")
        copies[node].meta["val"] = node.meta["val"]

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            if node in cut.views and node not in inside and writes(node):
                return copy(cut.views[node])
            copies[node] = graph.node_copy(node, copy)
        return copies[node]

    for node in region.nodes:
        copy(node)
    graph.output([copies[node] for node in region.outputs])
    return graph


def region_text(graph: fx.Graph) -> str:
    """Return a region's graph as text: all that a compiled function depends on."""
    names: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {_operand(node.args[0], names)}")
            continue
        names[node] = f"%{len(names)}"
        if node.op == "placeholder":
            value = node.meta["val"]
            form = (
                value.dtype,
                tuple(value.shape),
                value.stride(),
                value.storage_offset(),
                value.device,
            )
            lines.append(f"{names[node]} = {form}")
        else:
            lines.append(
                f"{names[node]} = {node.target} {_operand(node.args, names)} "
                f"{_operand(node.kwargs, names)}"
            )
    return "\n".join(lines)


def _operand(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(_operand(item, names) for item in value)}]"
    if isinstance(value, dict):
        return ", ".join(f"{key}={_operand(item, names)}" for key, item in value.items())
    return repr(value)
