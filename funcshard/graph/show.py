"""A graph as text: one line for each operation, the collectives by unit, buffer and size."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from funcshard._utils import operator_name, table, tree
from funcshard.graph.step_graph import StepGraph, collective_of
from funcshard.plan import dtype_name

__all__ = ["graph_text"]

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

    A result has a number, its dtype and its shape. Collectives stand out: an arrow to the right
    starts one, and an arrow to the left waits for it.
    """
    names: dict[fx.Node, str] = {}
    lines = []
    for node in step_graph.graph.nodes:
        if node.op == "output":
            lines.append(f"return {', '.join(_operand(each, names) for each in node.args[0])}")
            continue
        names[node] = f"%{len(names)}"
        if node.op != "placeholder":
            lines.append(_line(node, names))
    inputs = [node for node in step_graph.graph.nodes if node.op == "placeholder"]
    head = ", ".join(f"{names[node]}:{_form(node.meta.get('val'))}" for node in inputs)
    return "\n".join([f"step({head})", *(f"  {line}" for line in lines)])


def _line(node: fx.Node, names: dict[fx.Node, str]) -> str:
    kind = collective_of(node)
    result = f"{names[node]}:{_form(node.meta.get('val'))}"
    if kind in _VERBS:
        return f"{result} = → {_collective(node, kind)} {_operand(node.args[0], names)}"
    if kind == "wait":
        (start,) = node.all_input_nodes
        return f"{result} = ← {_collective(start, collective_of(start))} {names[start]}"
    operands = [_operand(each, names) for each in node.args]
    operands += [f"{key}={_operand(value, names)}" for key, value in node.kwargs.items() if value is not None]
    return f"{result} = {_operation(node, kind)} {' '.join(operands)}".rstrip()


def _operation(node: fx.Node, kind: str) -> str:
    name = kind or operator_name(node.target).partition("::")[2]
    return name or (str(node.target) if node.op == "get_attr" else getattr(node.target, "__name__", str(node.target)))


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
        return f"({', '.join(_form(each) for each in tree.leaves(value))})"
    if isinstance(value, torch.SymInt | int):
        return "int"
    return "float" if isinstance(value, torch.SymFloat | float) else "bool" if isinstance(value, torch.SymBool) else "none"


def _operand(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(_operand(each, names) for each in value)}]"
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)
