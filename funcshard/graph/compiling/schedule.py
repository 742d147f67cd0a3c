"""A compiled step as a graph of calls, and as Python code that frees tensors at their last use."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from funcshard._utils import operator_name


class CompiledRegion:
    """The call of a compiled region in a graph; its only argument is a list, which it empties.

    Attributes:
        run: the compiled function, from a list of tensors to a sequence of tensors.
        text: the text of the region.
    """

    __name__ = "region"

    def __init__(self, run: Callable[[list[torch.Tensor]], Any], text: str) -> None:
        self.run, self.text = run, text

    def __call__(self, inputs: list[torch.Tensor]) -> Any:
        return self.run(inputs)


# Methods cost a third of the call of an operator.
_METHODS = {
    "aten::view": "view",
    "aten::t": "t",
    "aten::as_strided": "as_strided",
    "aten::transpose": "transpose",
}


def as_function(graph: fx.Graph, constants: dict[str, torch.Tensor]) -> Callable[..., list[Any]]:
    """Return a graph of calls as a function of its placeholders."""
    return _Writer(graph, constants).function()


class _Writer:
    def __init__(self, graph: fx.Graph, constants: dict[str, torch.Tensor]) -> None:
        self.graph, self.constants = graph, constants
        self.globals: dict[str, Any] = {"inf": float("inf"), "nan": float("nan")}
        self.named: dict[int, str] = {}
        self.names: dict[fx.Node, str] = {}
        self.lines: list[str] = []

    def function(self) -> Callable[..., list[Any]]:
        free = _last_uses(self.graph)
        inputs = []
        for node_index, node in enumerate(self.graph.nodes):
            name = self.names.setdefault(node, f"v{node_index}")
            if node.op == "placeholder":
                inputs.append(name)
            elif node.op == "output":
                self.lines.append(
                    f"return [{', '.join(self._operand(result_node) for result_node in node.args[0])}]"
                )
                break
            elif node.op == "get_attr":
                self.lines.append(f"{name} = {self._global(self.constants[str(node.target)])}")
            elif isinstance(node.target, CompiledRegion):
                self._region(node, free)
                continue
            elif not (
                node.target is operator.getitem and isinstance(node.args[0].target, CompiledRegion)
            ):
                self.lines.append(f"{name} = {self._call(node)}")
            self._free(free[node])
        body = "\n".join(f"    {line}" for line in self.lines)
        code = compile(f"def run({', '.join(inputs)}):\n{body}\n", "<compiled step>", "exec")
        exec(code, self.globals)
        run: Callable[..., list[Any]] = self.globals["run"]
        return run

    def _region(self, node: fx.Node, free: dict[fx.Node, list[fx.Node]]) -> None:
        inputs: Any = node.args[0]
        self.lines.append(f"box = [{', '.join(self.names[input_node] for input_node in inputs)}]")
        self._free([freed_node for freed_node in free[node] if freed_node is not node])
        parts: dict[Any, fx.Node] = {user.args[1]: user for user in node.users}
        outputs = [parts.get(output_index) for output_index in range(max(parts, default=-1) + 1)]
        for output_index, part in enumerate(outputs):
            if part is not None:
                self.names[part] = f"p{len(self.names)}_{output_index}"
        left_names = "".join(f"{'_' if part is None else self.names[part]}, " for part in outputs)
        assert isinstance(node.target, CompiledRegion)
        self.lines.append(
            f"{left_names + '= ' if left_names else ''}{self._global(node.target.run)}(box)"
        )

    def _call(self, node: fx.Node) -> str:
        name = operator_name(node.target)
        if name in _METHODS and not node.kwargs:
            first, *further_operands = (self._operand(operand_node) for operand_node in node.args)
            return f"{first}.{_METHODS[name]}({', '.join(further_operands)})"
        operands = [self._operand(operand_node) for operand_node in node.args]
        operands += [f"{key}={self._operand(value)}" for key, value in node.kwargs.items()]
        if node.target is operator.getitem:
            return f"{operands[0]}[{operands[1]}]"
        return f"{self._global(node.target)}({', '.join(operands)})"

    def _free(self, nodes: list[fx.Node]) -> None:
        if names := [self.names[node] for node in nodes if node in self.names]:
            self.lines.append(f"del {', '.join(names)}")

    def _operand(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, tuple | list):
            return f"[{', '.join(self._operand(item) for item in value)}]"
        if value is None or isinstance(value, bool | int | float | str):
            return repr(value)
        return self._global(value)

    def _global(self, value: Any) -> str:
        name = self.named.setdefault(id(value), f"g{len(self.named)}")
        self.globals[name] = value
        return name


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return the nodes whose values are free after each node."""
    last_uses: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        for input_node in node.all_input_nodes:
            last[input_node] = node
    for node, user in last.items():
        if node.op != "output" and not isinstance(node.target, CompiledRegion):
            last_uses[user].append(node)
    return last_uses
