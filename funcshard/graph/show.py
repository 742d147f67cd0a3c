"""A graph as text and as HTML, and how two graphs differ."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import fx

from funcshard._utils import table, tree
from funcshard._utils.table import Bullets, Part, Shown, Table
from funcshard._utils.torch_operators import operator_name
from funcshard.graph.memory import Section, memory_of, sections_of
from funcshard.graph.signatures import sizes_text
from funcshard.graph.step_graph import STARTS, StepGraph, collective_of
from funcshard.plan import dtype_name

_VERBS = {
    "all_gather": "gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce", "broadcast": "broadcast",
    "all_to_all": "all-to-all",
}  # fmt: skip
_ARROWS = (*_VERBS, "wait")  # starts and ends of collectives
_MOST = 40  # lines of a list


def graph_text(step_graph: StepGraph) -> str:
    """Return a graph as text, with a line for each operation and headings for units.

    An arrow to the right starts a collective, and one to the left waits for it.
    """
    names = _names(step_graph)
    lines = ["step(", *(f"  {line}" for line in _inputs(step_graph, names)), ")"]
    lines += _sizes(step_graph)
    for section in sections_of(step_graph.graph):
        lines += [f"\n  ── {_title(section)} ──", _body(section, names)]
    return "\n".join([*lines, "", _results(step_graph, names)])


def graph_html(step_graph: StepGraph) -> str:
    """Return a graph as HTML, with sections that open."""
    names = _names(step_graph)
    inputs = [*_inputs(step_graph, names), *_sizes(step_graph)]
    detail_parts = [_details("inputs", len(inputs), [], "\n".join(inputs))]
    for section in sections_of(step_graph.graph):
        lines = [
            _line(node, names) for node in section.nodes if collective_of(node) in _ARROWS
        ]
        detail_parts.append(
            _details(_title(section), len(section.nodes), lines, _body(section, names))
        )
    outputs: Any = step_graph.graph.output_node().args[0]
    detail_parts.append(_details("return", len(outputs), [], _results(step_graph, names)))
    return "".join(detail_parts)


def _details(title: str, count: int, collectives: list[str], text: str) -> str:
    short_lines = "<br>".join(html.escape(line.partition(" = ")[2]) for line in collectives)
    return (
        f'<details style="margin:2px 0"><summary><b>{html.escape(title)}</b> <span style="opacity:0.6">{count}</span>'
        f'<div style="font:85% monospace;opacity:0.75;margin:0 0 4px 16px">{short_lines}</div></summary>'
        f'<pre style="margin:4px 0 8px 16px;font-size:85%">{html.escape(text)}</pre></details>'
    )


def _names(step_graph: StepGraph) -> dict[fx.Node, str]:
    nodes = [node for node in step_graph.graph.nodes if node.op != "output"]
    return {node: f"%{node_index}" for node_index, node in enumerate(nodes)}


def _inputs(step_graph: StepGraph, names: dict[fx.Node, str]) -> list[str]:
    input_texts, input_paths = [], []
    placeholders = step_graph.graph.find_nodes(op="placeholder")
    for node, leaf_index in zip(placeholders, step_graph.inputs, strict=True):
        input_form = _form(node.meta.get("val"))
        leaf: Any = step_graph.signature.leaves[leaf_index]
        # Note: a size that may change is its name in the signature, and a number in the graph.
        if isinstance(leaf, tuple) and any(isinstance(size, str) for size in leaf[0]):
            input_form = f"{input_form.partition('[')[0]}[{','.join(map(str, leaf[0]))}]"
        input_texts.append(f"{names[node]}:{input_form}")
        input_paths.append(node.meta.get("path", ""))
    text_width = max(map(len, input_texts), default=0)
    text_pairs = zip(input_texts, input_paths, strict=True)
    return [f"{result:{text_width}}  {path}".rstrip() for result, path in text_pairs]


def _sizes(step_graph: StepGraph) -> list[str]:
    if not step_graph.sizes:
        return []
    size_rules = ", ".join(step_graph.conditions.texts)
    return [f"shown for {sizes_text(step_graph.sizes)}, and runs for all with {size_rules}"]


def _title(section: Section) -> str:
    return (
        section.phase
        if section.unit is None
        else f"{section.phase} {section.unit or '(root)'}"
    )


def _body(section: Section, names: dict[fx.Node, str]) -> str:
    return "\n".join(f"  {_line(node, names)}" for node in section.nodes)


def _results(step_graph: StepGraph, names: dict[fx.Node, str]) -> str:
    outputs: Any = step_graph.graph.output_node().args[0]
    return f"return {', '.join(_operand(output, names) for output in outputs)}"


def _line_without_names(node: fx.Node) -> str:
    """Return the line of a node with forms in place of names."""
    form_of_node = {
        used: _form(used.meta.get("val")) for used in (node, *node.all_input_nodes)
    }
    if collective_of(node) in _ARROWS:
        return _arrow(node)
    return _line(node, form_of_node).partition(":")[2]


def _line(node: fx.Node, names: dict[fx.Node, str]) -> str:
    result_text = f"{names[node]}:{_form(node.meta.get('val'))} ="
    operation_name = collective_of(node)
    if operation_name in _ARROWS:
        # Note: the event says what the further arguments of a collective say.
        return f"{result_text} {_arrow(node)} {_operand(node.args[0], names)}"
    operation_name = operation_name or operator_name(node.target).partition("::")[2]
    if not operation_name:  # a constant, or a function on numbers
        operation_name = getattr(node.target, "__name__", str(node.target))
    operand_texts = [_operand(operand, names) for operand in node.args]
    operand_texts += [
        f"{key}={_operand(value, names)}"
        for key, value in node.kwargs.items()
        if value is not None
    ]
    return f"{result_text} {operation_name} {' '.join(operand_texts)}".rstrip()


def _arrow(node: fx.Node) -> str:
    """Return the start or the wait of a collective, as ``→ gather blocks.3 float32 3.4 MiB``."""
    is_wait = collective_of(node) == "wait"
    start = node.all_input_nodes[0] if is_wait else node
    arrow_text = f"{'→←'[is_wait]} {_VERBS[collective_of(start)]}"
    event = start.meta.get("event")
    if event is None:
        return arrow_text
    if event.unit is not None:
        arrow_text += f" {event.unit or '(root)'} {event.buffer}"
    return f"{arrow_text} {table.size(event.bytes)} along {event.axis}"


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = dtype_name(value.dtype)
        for word, letter in (("float", "f"), ("uint", "u"), ("int", "i")):
            dtype = dtype.replace(word, letter)
        return f"{dtype}[{','.join(str(int(size)) for size in value.shape)}]"
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


# --- two graphs -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class StepDifference(Shown):
    """How a traced step differs from another one, for you to print."""

    before: StepGraph
    after: StepGraph
    collectives: tuple[str, ...]
    operations: tuple[str, ...]

    @classmethod
    def of(cls, before: StepGraph, after: StepGraph) -> StepDifference:
        """Return how two graphs differ."""
        change_parts: tuple[list[str], list[str]] = [], []
        for change in _changes(_lines(before.graph), _lines(after.graph)):
            _, _, line = change.partition(": ")
            change_parts[line[0] not in "→←"].append(change)
        return cls(before, after, *map(tuple, change_parts))

    def _parts(self) -> Iterable[Part]:
        rows = list(_rows(self.before, self.after))
        yield Table("Two steps", ["what", "before", "after"], rows)
        for heading, heading_lines in (
            ("Collectives", self.collectives),
            ("Operations", self.operations),
        ):
            if heading_lines:
                more = [f"and {len(heading_lines) - _MOST} more"] * (
                    len(heading_lines) > _MOST
                )
                yield Bullets(heading, [*heading_lines[:_MOST], *more])
            else:
                yield f"{heading}: the same, in the same order."


def _rows(*step_graphs: StepGraph) -> Iterable[list[str]]:
    for kind in STARTS:
        kind_sizes = [
            [e.bytes for e in graph.events if e.kind == kind] for graph in step_graphs
        ]
        if any(kind_sizes):
            cells = [
                f"{len(part)} of {table.size(sum(part))}" if part else "none"
                for part in kind_sizes
            ]
            yield [f"{_VERBS[kind]}s", *cells]
    memories = list(map(memory_of, step_graphs))
    yield ["peak", *(table.size(memory.peak) for memory in memories)]
    yield ["peak gathered", *(table.size(memory.peak_gathered) for memory in memories)]


def _lines(graph: fx.Graph) -> list[str]:
    nodes = (node for node in graph.nodes if node.op not in ("placeholder", "output"))
    return list(map(_line_without_names, nodes))


def _changes(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the lines that are new, gone, earlier or later, in order."""
    listed_changes: list[str] = []
    unpaired: dict[str, list[int]] = defaultdict(list)  # places in that list, by line
    for verb, line in _edits(before, after):
        change, places = f"{verb}: {line}", unpaired[line]
        # Note: a line that is gone at one place and new at another one has moved.
        if places and listed_changes[places[0]] != change:
            direction = "earlier" if verb == "gone" else "later"
            listed_changes[places.pop(0)] = f"{direction}: {line}"
        else:
            places.append(len(listed_changes))
            listed_changes.append(change)
    return listed_changes


def _edits(before: Sequence[str], after: Sequence[str]) -> Iterable[tuple[str, str]]:
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    for kind, old_begin, old_end, new_begin, new_end in matcher.get_opcodes():
        if kind != "equal":
            yield from (("gone", line) for line in before[old_begin:old_end])
            yield from (("new", line) for line in after[new_begin:new_end])
