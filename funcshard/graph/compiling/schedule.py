"""A compiled step as a graph of calls, and as Python code that frees tensors at their last use."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from funcshard._utils.torch_compilers import Boxed
from funcshard._utils.torch_operators import operator_name


class CompiledRegion:
    """The call of a compiled region; its only argument is a list, which it empties."""

    __name__ = "region"

    def __init__(self, run: Boxed) -> None:
        self.run = run

    def __call__(self, inputs: list[torch.Tensor]) -> Any:
        return self.run(inputs)


# Why: methods cost a third of the call of an operator.
_METHODS = {
    "aten::view": "view",
    "aten::t": "t",
    "aten::as_strided": "as_strided",
    "aten::transpose": "transpose",
}


def as_function(graph: fx.Graph, constants: dict[str, torch.Tensor]) -> Callable[..., list[Any]]:
    """Return a graph of calls as a function of its placeholders."""
    # Why not a ``fx.GraphModule``: its frame would hold the inputs of a region while the region
    # runs.
    return _Writer(graph, constants).function()


class _Writer:
    def __init__(self, graph: fx.Graph, constants: dict[str, torch.Tensor]) -> None:
        self.graph, self.constants = graph, constants
        self.globals: dict[str, Any] = {"inf": float("inf"), "nan": float("nan")}
        self.global_names: dict[int, str] = {}
        self.names: dict[fx.Node, str] = {}
        self.lines: list[str] = []

    def function(self) -> Callable[..., list[Any]]:
        freed_after = _last_uses(self.graph)
        parameters = []
        for node_index, node in enumerate(self.graph.nodes):
            node_name = self.names.setdefault(node, f"v{node_index}")
            if node.op == "placeholder":
                parameters.append(node_name)
            elif node.op == "output":
                self.lines.append(f"return {self._operand(node.args[0])}")
                break
            elif node.op == "get_attr":
                self.lines.append(f"{node_name} = {self._global(self.constants[str(node.target)])}")
            elif _is_region(node):
                self._call_region(node, freed_after[node])
                continue
            elif not _is_part(node):
                self.lines.append(f"{node_name} = {self._call(node)}")
            self._free(freed_after[node])
        function_body = "\n".join(f"    {line}" for line in self.lines)
        code_object = compile(
            f"def run({', '.join(parameters)}):\n{function_body}\n", "<compiled step>", "exec"
        )
        # Note: variables have names that were made here. Of a file, only names of arguments are in
        # the text, and those are identifiers.
        exec(code_object, self.globals)
        run: Callable[..., list[Any]] = self.globals["run"]
        return run

    def _call_region(self, node: fx.Node, freed_nodes: list[fx.Node]) -> None:
        target: Any = node.target
        self.lines.append(f"box = {self._operand(node.args[0])}")
        # Why before the call: the box alone then holds the inputs, so the region can free them.
        self._free(freed_nodes)
        part_of_index: dict[Any, fx.Node] = {user.args[1]: user for user in node.users}
        part_names = ["_"] * (max(part_of_index, default=-1) + 1)
        for part_index, part_node in part_of_index.items():
            # Note: the part comes later in the graph, and keeps this name.
            part_names[part_index] = self.names[part_node] = f"p{len(self.names)}_{part_index}"
        assigned = "".join(f"{name}, " for name in part_names)
        self.lines.append(f"{assigned}{'= ' * bool(part_of_index)}{self._global(target.run)}(box)")

    def _call(self, node: fx.Node) -> str:
        operand_texts = [self._operand(operand) for operand in node.args]
        operand_texts += [f"{key}={self._operand(value)}" for key, value in node.kwargs.items()]
        method_name = _METHODS.get(operator_name(node.target))
        if method_name and not node.kwargs:
            return f"{operand_texts[0]}.{method_name}({', '.join(operand_texts[1:])})"
        if node.target is operator.getitem:
            return f"{operand_texts[0]}[{operand_texts[1]}]"
        return f"{self._global(node.target)}({', '.join(operand_texts)})"

    def _free(self, nodes: list[fx.Node]) -> None:
        if freed_names := [self.names[node] for node in nodes if node in self.names]:
            # Note: a local variable would hold its tensor until the end of the step.
            self.lines.append(f"del {', '.join(freed_names)}")

    def _operand(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, tuple | list):
            return f"[{', '.join(map(self._operand, value))}]"
        if value is None or isinstance(value, bool | int | float | str):
            return repr(value)
        # Note: devices, dtypes and operators.
        return self._global(value)

    def _global(self, value: Any) -> str:
        global_name = self.global_names.setdefault(id(value), f"g{len(self.global_names)}")
        self.globals[global_name] = value
        return global_name


def _is_region(node: fx.Node) -> bool:
    return isinstance(node.target, CompiledRegion)


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem and _is_region(node.all_input_nodes[0])


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return the nodes whose values are free after each node."""
    last_user: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last_user |= dict.fromkeys((node, *node.all_input_nodes), node)
    freed_after: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, user in last_user.items():
        # Note: a region's parts have names; the region itself has none.
        if node.op != "output" and not _is_region(node):
            freed_after[user].append(node)
    return freed_after
