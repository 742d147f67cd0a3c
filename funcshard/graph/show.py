"""A graph as text and as HTML: a line for each operation, the collectives by unit and size."""

from __future__ import annotations

import html
from typing import Any

import torch
from torch import fx

from funcshard._utils import operator_name, table, tree
from funcshard.graph.sections import Section, sections_of
from funcshard.graph.step_graph import StepGraph, collective_of
from funcshard.plan import dtype_name

_SHORT = {
    "float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "bool",
}  # fmt: skip
_VERBS = {
    "all_gather": "gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce", "broadcast": "broadcast",
    "all_to_all": "all-to-all",
}  # fmt: skip


def graph_text(step_graph: StepGraph) -> str:
    """Return a graph as text, in order, with a line for each operation.

    A result has a number, its dtype and its shape. Collectives are marked: an arrow to the right
    starts one, and an arrow to the left waits for it. A heading says which part of the step and
    which unit the operations after it belong to.
    """
    names = _names(step_graph)
    sections = sections_of(step_graph.graph)
    body = [f"\n  ── {_title(section)} ──\n{_body(section, names)}" for section in sections]
    inputs = (f"  {line}" for line in _inputs(step_graph, names))
    return "\n".join(
        ["step(", *inputs, ")", *_sizes(step_graph), *body, "", _results(step_graph, names)]
    )


def graph_html(step_graph: StepGraph) -> str:
    """Return a graph as HTML: its sections, each of which opens to its operations."""
    names = _names(step_graph)
    inputs = [*_inputs(step_graph, names), *_sizes(step_graph)]
    parts = [("inputs", len(inputs), list[str](), "\n".join(inputs))]
    for section in sections_of(step_graph.graph):
        lines = [
            _line(node, names) for node in section.nodes if collective_of(node) in (*_VERBS, "wait")
        ]
        parts.append((_title(section), len(section.nodes), lines, _body(section, names)))
    (output,) = step_graph.graph.find_nodes(op="output")
    parts.append(("return", len(output.args[0]), [], _results(step_graph, names)))
    return "".join(_details(*part) for part in parts)


def _details(title: str, count: int, collectives: list[str], text: str) -> str:
    """Return a heading with the collectives under it, which opens to a text."""
    short = "<br>".join(html.escape(line.partition(" = ")[2]) for line in collectives)
    return (
        f'<details style="margin:2px 0"><summary><b>{html.escape(title)}</b> <span style="opacity:0.6">{count}</span>'
        f'<div style="font:85% monospace;opacity:0.75;margin:0 0 4px 16px">{short}</div></summary>'
        f'<pre style="margin:4px 0 8px 16px;font-size:85%">{html.escape(text)}</pre></details>'
    )


def _names(step_graph: StepGraph) -> dict[fx.Node, str]:
    """Return the name of each node, in order."""
    nodes = [node for node in step_graph.graph.nodes if node.op != "output"]
    return {node: f"%{node_index}" for node_index, node in enumerate(nodes)}


def _inputs(step_graph: StepGraph, names: dict[fx.Node, str]) -> list[str]:
    """Return a line for each input of a graph."""
    leaves = [step_graph.signature.leaves[i] for i in step_graph.inputs]
    nodes = [node for node in names if node.op == "placeholder"]
    input_names = [
        (f"{names[node]}:{_input_form(node, leaf)}", node)
        for node, leaf in zip(nodes, leaves, strict=True)
    ]
    width = max((len(input_text) for input_text, _ in input_names), default=0)
    return [
        f"{input_text:{width}}  {node.meta.get('path', '')}".rstrip()
        for input_text, node in input_names
    ]


def _input_form(node: fx.Node, leaf: Any) -> str:
    """Return the form of an input; a size that may change is its name."""
    form = _form(node.meta.get("val"))
    named = isinstance(leaf, tuple) and any(isinstance(size, str) for size in leaf[0])
    return f"{form.partition('[')[0]}[{','.join(map(str, leaf[0]))}]" if named else form


def _sizes(step_graph: StepGraph) -> list[str]:
    """Return a line for the sizes of a graph that serves others too."""
    sizes = ", ".join(f"{name} = {size}" for name, size in step_graph.sizes.items())
    return (
        [f"shown for {sizes}, and runs for all with {', '.join(step_graph.conditions.texts)}"]
        if sizes
        else []
    )


def _title(section: Section) -> str:
    return section.phase if section.unit is None else f"{section.phase} {section.unit or '(root)'}"


def _body(section: Section, names: dict[fx.Node, str]) -> str:
    return "\n".join(f"  {_line(node, names)}" for node in section.nodes)


def _results(step_graph: StepGraph, names: dict[fx.Node, str]) -> str:
    (output,) = step_graph.graph.find_nodes(op="output")
    return f"return {', '.join(_operand(result_node, names) for result_node in output.args[0])}"


def line_without_names(node: fx.Node) -> str:
    """Return the line of a node with the forms of its operands; that of a collective has none."""
    collective_kind = collective_of(node)
    if collective_kind in _VERBS:
        return f"→ {_collective(node, collective_kind)}"
    if collective_kind == "wait":
        (start,) = node.all_input_nodes
        return f"← {_collective(start, collective_of(start))}"
    return _line(
        node,
        {
            line_node: _form(line_node.meta.get("val"))
            for line_node in (node, *node.all_input_nodes)
        },
    ).partition(":")[2]


def _line(node: fx.Node, names: dict[fx.Node, str]) -> str:
    collective_kind = collective_of(node)
    result = f"{names[node]}:{_form(node.meta.get('val'))}"
    if collective_kind in _VERBS:
        return f"{result} = → {_collective(node, collective_kind)} {_operand(node.args[0], names)}"
    if collective_kind == "wait":
        (start,) = node.all_input_nodes
        return f"{result} = ← {_collective(start, collective_of(start))} {names[start]}"
    operands = [_operand(operand, names) for operand in node.args]
    operands += [
        f"{key}={_operand(value, names)}" for key, value in node.kwargs.items() if value is not None
    ]
    return f"{result} = {_operation(node, collective_kind)} {' '.join(operands)}".rstrip()


def _operation(node: fx.Node, kind: str) -> str:
    name = kind or operator_name(node.target).partition("::")[2]
    return name or (
        str(node.target)
        if node.op == "get_attr"
        else getattr(node.target, "__name__", str(node.target))
    )


def _collective(node: fx.Node, kind: str) -> str:
    """Return a collective as text, such as ``gather blocks.3 float32 3.4 MiB``."""
    event = node.meta.get("event")
    if event is None:
        return _VERBS[kind]
    owner = "" if event.unit is None else f"{event.unit or '(root)'} {event.buffer} "
    return f"{_VERBS[kind]} {owner}{table.size(event.bytes)} along {event.axis}"


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = dtype_name(value.dtype)
        return f"{_SHORT.get(dtype, dtype)}[{','.join(str(int(size)) for size in value.shape)}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(_form(leaf) for leaf in tree.leaves(value))})"
    if isinstance(value, torch.SymInt | int):
        return "int"
    if isinstance(value, torch.SymFloat | float):
        return "float"
    return "bool" if isinstance(value, torch.SymBool) else "none"


def _operand(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(_operand(item, names) for item in value)}]"
    if isinstance(value, torch.device):
        return value.type  # ranks have devices of other numbers
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)
