"""Cut a graph into regions: groups of operations that can be compiled as one function.

A collective, an operation that draws random numbers, and an operation that no compiler takes stay
ordinary calls, in order. Between two of them lies a stretch, and another stretch begins with the
work of another unit. Operations of one stretch that share neither values nor written memory belong
to different regions. So equal work, such as the update of
a hundred equal units, becomes equal regions. A view moves no data, so each region takes the memory
behind a view and makes the view itself. No two inputs of a region share memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from funcshard._utils import operator_name, tree, writes_inputs
from funcshard.graph.effects import written_by
from funcshard.graph.sections import sections_of
from funcshard.graph.step_graph import collective_of
from funcshard.graph.storages import GraphStorages

# One fast kernel for many tensors, which a compiler would write less well.
_FUSED = ("aten::_fused_adamw_", "aten::_fused_adam_", "aten::_fused_sgd_", "aten::_fused_adagrad_")
# Sums in the order of an index, which compilers give to several threads in no fixed order.
# Parts of their names, because each of them has variants that write in place or check nothing.
_SCATTERED = (
    "embedding_dense_backward",
    "index_put",
    "index_add",
    "index_reduce",
    "scatter_add",
    "scatter_reduce",
)
_LEAST = 2  # operations; a single one runs as it is


@dataclass(slots=True, eq=False)
class Region:
    """Operations that run together.

    Attributes:
        nodes: the operations, in order, without views.
        inputs: the tensors from outside, none of which is a view.
        outputs: the results that other operations use, none of which is a view.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A graph, cut into regions and ordinary calls.

    Attributes:
        steps: regions, and nodes that are ordinary calls, in the order of a run.
        views: the node that each view views. The result of an operation that writes counts as a
            view of the tensor that it writes.
    """

    steps: list[Region | fx.Node]
    views: dict[fx.Node, fx.Node]

    @classmethod
    def find(cls, graph: fx.Graph) -> Cut:
        """Return the regions of a graph."""
        return _Cutter(graph).cut()

    def behind(self, node: fx.Node) -> fx.Node:
        """Return the node whose memory a node views; itself, if it is no view."""
        while node in self.views:
            node = self.views[node]
        return node


class _Cutter:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.storages = graph, GraphStorages.find(graph)
        self.found = Cut([], {})
        self.stretch: dict[fx.Node, int] = {}  # of each operation that is compiled
        self.above: dict[fx.Node, fx.Node] = {}  # union-find over the operations of a region

    def cut(self) -> Cut:
        early: list[fx.Node] = []
        compute: list[fx.Node] = []
        stretches, begins = 0, set(_begins(self.graph))
        for node in self.graph.nodes:
            if node.op == "output":
                break
            if node in begins:
                self._end(early, compute)
                early, compute, stretches = [], [], stretches + 1
            if (base := self._viewed(node)) is not None:
                self.found.views[node] = base
            elif self._is_early(node):
                early.append(node)
            elif self._is_compiled(node):
                compute.append(node)
                self._add(node, stretches)
            else:
                self._end(early, compute)
                self.found.steps.append(node)
                early, compute, stretches = [], [], stretches + 1
        self._end(early, compute)
        self._find_outputs()
        return self.found

    def _end(self, early: list[fx.Node], compute: list[fx.Node]) -> None:
        self.found.steps.extend(early)
        self.found.steps.extend(self._regions(compute))

    def _viewed(self, node: fx.Node) -> fx.Node | None:
        """Return the node that a node views without writing; ``None`` if it is no view."""
        if node.op != "call_function" or collective_of(node) or writes(node):
            return None
        if node.target is operator.getitem:
            (parent,) = node.all_input_nodes
            return parent if parent in self.found.views else None
        own_storages = self.storages.of[node]
        if not own_storages or any(self.storages.made[storage] is node for storage in own_storages):
            return None
        return node.all_input_nodes[0]

    def _is_early(self, node: fx.Node) -> bool:
        """Return whether a node may run at the start of its stretch: it reads no tensor."""
        if node.op != "call_function":
            return True
        if node.target is operator.getitem:
            return node.args[0] not in self.stretch
        return _is_number(node) and all(
            _is_number(input_node) for input_node in node.all_input_nodes
        )

    def _is_compiled(self, node: fx.Node) -> bool:
        """Return whether a compiler takes an operation."""
        target: Any = node.target
        if target is operator.getitem:
            return True
        name = operator_name(target)
        if (
            not name.startswith(("aten::", "prims::"))
            or name in _FUSED
            or any(scatter_name in name for scatter_name in _SCATTERED)
        ):
            return False
        if {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape} & set(target.tags):
            return False
        values = [leaf for leaf in tree.leaves(node.meta.get("val")) if leaf is not None]
        if any(not isinstance(value, torch.Tensor) or value.is_complex() for value in values):
            return False
        return not any(_is_number(input_node) for input_node in node.all_input_nodes)

    def _add(self, node: fx.Node, stretch: int) -> None:
        self.stretch[node], self.above[node] = stretch, node
        if written_by(node) and isinstance(node.meta.get("val"), torch.Tensor):
            # Note: not the first input, which is another tensor where the call has out=.
            self.found.views[node] = written_by(node)[0]
        for input_node in node.all_input_nodes:
            base = self.found.behind(input_node)
            if self.stretch.get(base) == stretch:
                self._join(node, base)

    def _join(self, one: fx.Node, other: fx.Node) -> None:
        self.above[self._head(one)] = self._head(other)

    def _head(self, node: fx.Node) -> fx.Node:
        while (above := self.above[node]) is not node:
            self.above[node] = self.above[above]
            node = above
        return node

    def _regions(self, compute: list[fx.Node]) -> Iterator[Region | fx.Node]:
        """Yield the regions of a stretch; the operations themselves where a region is too small."""
        users: dict[int, list[fx.Node]] = {}
        for node in compute:
            for storage in self._touched(node):
                users.setdefault(storage, []).append(node)
        for storage in {storage for node in compute for storage in self._written(node)}:
            for first_user, second_user in zip(users[storage], users[storage][1:], strict=False):
                self._join(first_user, second_user)
        region_of_node: dict[fx.Node, Region] = {}
        for node in compute:
            region_of_node.setdefault(self._head(node), Region()).nodes.append(node)
        for region in region_of_node.values():
            self._find_inputs(region)
            if self._is_worth(region):
                yield region
            else:
                for node in region.nodes:
                    del self.stretch[node]
                    yield node

    def _touched(self, node: fx.Node) -> set[int]:
        return {
            storage
            for touched_node in (node, *node.all_input_nodes)
            for storage in self.storages.of[touched_node]
        }

    def _written(self, node: fx.Node) -> set[int]:
        return self._touched(node) if writes(node) else set()

    def _find_inputs(self, region: Region) -> None:
        inside = set(region.nodes)
        inputs_behind = (
            self.found.behind(input_node)
            for node in region.nodes
            for input_node in node.all_input_nodes
            if input_node not in inside
        )
        region.inputs = list(
            dict.fromkeys(input_node for input_node in inputs_behind if input_node not in inside)
        )

    def _is_worth(self, region: Region) -> bool:
        storages = [storage for node in region.inputs for storage in self.storages.of[node]]
        alone = len(set(storages)) == len(storages)
        tensors = all(isinstance(node.meta.get("val"), torch.Tensor) for node in region.inputs)
        return (
            alone
            and tensors
            and sum(node.target is not operator.getitem for node in region.nodes) >= _LEAST
        )

    def _find_outputs(self) -> None:
        region_of = {
            node: step
            for step in self.found.steps
            if isinstance(step, Region)
            for node in step.nodes
        }
        used: dict[fx.Node, None] = {}
        for node in self.graph.nodes:
            own_region = region_of.get(node)
            if own_region is None and node in self.found.views and node not in self.above:
                continue  # each user makes the view itself
            for input_node in node.all_input_nodes:
                base = input_node
                while base in self.found.views and not (
                    own_region is not None and region_of.get(base) is own_region
                ):
                    base = self.found.views[base]
                if base in region_of and region_of[base] is not own_region:
                    used[base] = None
        for node, region in region_of.items():
            if node in used:
                region.outputs.append(node)


def _begins(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield where the work of another unit begins, in forward and in backward."""
    unit_before = None
    for section in sections_of(graph):
        if section.phase != "update" and section.unit is not None:
            if unit_before is not None and section.unit != unit_before:
                yield section.nodes[0]
            unit_before = section.unit


def writes(node: fx.Node) -> bool:
    """Return whether an operation writes to one of its inputs."""
    return bool(operator_name(node.target)) and writes_inputs(node.target)


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return value is not None and not isinstance(value, torch.Tensor | tuple | list)
