"""Cut a graph into regions: groups of operations that are compiled as one function.

Collectives, random numbers, and operations that no compiler takes stay ordinary calls. A stretch
lies between two of them, or begins with the work of another unit. Operations of a stretch that
share neither values nor written memory are in different regions, so equal work, such as the updates
of equal units, becomes equal regions. A region makes views itself, so no two of its inputs share
memory.

``CompilingBind`` compiles the regions of a graph, and makes a function of their calls.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from funcshard._utils import tree
from funcshard._utils.torch_compilers import Boxed, compile_with, find_backend, inductor
from funcshard._utils.torch_operators import operator_name
from funcshard._utils.torch_symbols import put_number
from funcshard.comm import Mesh
from funcshard.graph.effects import is_view, written_by
from funcshard.graph.memory import GraphStorages, sections_of
from funcshard.graph.replay import lower
from funcshard.graph.signatures import Conditions
from funcshard.graph.step_graph import StepGraph, collective_of, filled
from funcshard.graph.tidying import layout_of

_log = logging.getLogger("funcshard.graph")
# Why one for all: torch's compilers keep state of the process, and simulated ranks are threads.
_compiling = threading.RLock()

Backend = str | Callable[..., Any]

# One fast kernel for many tensors, which a compiler would write less well.
_FUSED = (
    "aten::_fused_adamw_",
    "aten::_fused_adam_",
    "aten::_fused_sgd_",
    "aten::_fused_adagrad_",
)
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
_UNCOMPILED_TAGS = {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape}
_LEAST = 2  # operations; a single one runs as it is


@dataclass(slots=True, eq=False)
class Region:
    """Operations that run together.

    Attributes:
        nodes: the operations, in order, without views.
        inputs: the tensors from outside; no views.
        outputs: the results that other operations use; no views.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)


class Cut:
    """A graph, cut into regions and ordinary calls.

    Attributes:
        steps: regions, and nodes that are ordinary calls, in the order of a run.
        views: the node that each view, or each compiled write, is a view of.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.steps: list[Region | fx.Node] = []
        self.views: dict[fx.Node, fx.Node] = {}
        self._storages = GraphStorages.find(graph)
        self._region_of: dict[fx.Node, Region] = {}
        # The current stretch: calls that run first, and operations to compile, with keys as a set.
        self._early: list[fx.Node] = []
        self._compute: dict[fx.Node, None] = {}
        unit_begins = set(_unit_begins(graph))
        for node in graph.nodes:
            if node.op == "output":
                break
            if node in unit_begins:
                self._end_stretch()
            if (viewed_node := self._viewed(node)) is not None:
                self.views[node] = viewed_node
            elif self._is_early(node):
                self._early.append(node)
            elif self._is_compiled(node):
                self._add(node)
            else:
                self._end_stretch()
                self.steps.append(node)
        self._end_stretch()
        self._find_outputs(graph)

    def behind(self, node: fx.Node) -> fx.Node:
        """Return the node whose memory a node views, which may be itself."""
        while node in self.views:
            node = self.views[node]
        return node

    def _viewed(self, node: fx.Node) -> fx.Node | None:
        """Return the node that a node views without writing, or ``None``."""
        if not is_view(node, self._storages):
            return None
        viewed_node = node.all_input_nodes[0]
        # Note: a part of an operation's several results has its memory too, and is no view.
        if node.target is operator.getitem and viewed_node not in self.views:
            return None
        return viewed_node

    def _is_early(self, node: fx.Node) -> bool:
        """Return whether a node reads no tensor, so that it may run at the start of its stretch."""
        if node.op != "call_function":
            return True
        if node.target is operator.getitem:
            return node.args[0] not in self._region_of
        return all(map(_is_number, (node, *node.all_input_nodes)))

    def _is_compiled(self, node: fx.Node) -> bool:
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
        # Note: a compiler has other random numbers, and one code for each shape.
        if _UNCOMPILED_TAGS & set(target.tags):
            return False
        result_leaves = [
            leaf for leaf in tree.leaves(node.meta.get("val")) if leaf is not None
        ]
        if any(
            not isinstance(leaf, torch.Tensor) or leaf.is_complex()
            for leaf in result_leaves
        ):
            return False
        # Note: a compiler would bake a number in, such as the learning rate of this step.
        return not any(map(_is_number, node.all_input_nodes))

    def _add(self, node: fx.Node) -> None:
        """Add an operation to the region of the operations that it reads."""
        self._compute[node] = None
        self._region_of[node] = Region([node])
        if written_by(node) and isinstance(node.meta.get("val"), torch.Tensor):
            # Note: not the first input, which is another tensor where the call has out=.
            self.views[node] = written_by(node)[0]
        for input_node in node.all_input_nodes:
            base = self.behind(input_node)
            if base in self._compute:
                self._join(node, base)

    def _join(self, first: fx.Node, second: fx.Node) -> None:
        first_region, second_region = self._region_of[first], self._region_of[second]
        if first_region is second_region:
            return
        # Why the first: a new operation joins the long region of what it reads.
        second_region.nodes += first_region.nodes
        self._region_of.update(dict.fromkeys(first_region.nodes, second_region))

    def _end_stretch(self) -> None:
        """Add the calls and regions of the stretch; a small region as its nodes."""
        self._join_writers()
        self.steps += self._early
        nodes_of: dict[Region, list[fx.Node]] = defaultdict(list)
        for node in self._compute:
            nodes_of[self._region_of[node]].append(node)
        for region, nodes in nodes_of.items():
            region.nodes = nodes  # in the order of the graph
            region.inputs = self._inputs(nodes)
            if self._is_worth(region):
                self.steps.append(region)
            else:
                self.steps += nodes
                for node in nodes:
                    del self._region_of[node]
        self._early, self._compute = [], {}

    def _join_writers(self) -> None:
        """Join operations of the stretch if one writes memory that another uses."""
        users_of: dict[int, list[fx.Node]] = defaultdict(list)
        written_storages: set[int] = set()
        for node in self._compute:
            touched_storages = self._storages.under((node, *node.all_input_nodes))
            for storage in touched_storages:
                users_of[storage].append(node)
            if written_by(node):
                written_storages |= touched_storages
        for storage in written_storages:
            first_user, *further_users = users_of[storage]
            for user in further_users:
                self._join(first_user, user)

    def _inputs(self, nodes: list[fx.Node]) -> list[fx.Node]:
        inside = set(nodes)
        outside_nodes = [
            n for node in nodes for n in node.all_input_nodes if n not in inside
        ]
        # Note: several views of one tensor are one input.
        base_nodes = dict.fromkeys(map(self.behind, outside_nodes))
        return [base for base in base_nodes if base not in inside]

    def _is_worth(self, region: Region) -> bool:
        input_storages = [
            storage for node in region.inputs for storage in self._storages.of[node]
        ]
        # Why: Inductor assumes that a write to one input changes no other.
        if len(set(input_storages)) < len(input_storages):
            return False
        if not all(
            isinstance(node.meta.get("val"), torch.Tensor) for node in region.inputs
        ):
            return False
        return sum(node.target is not operator.getitem for node in region.nodes) >= _LEAST

    def _find_outputs(self, graph: fx.Graph) -> None:
        used_nodes: set[fx.Node] = set()
        for node in graph.nodes:
            region = self._region_of.get(node)
            if region is None and node in self.views and not written_by(node):
                continue  # each user makes the view itself
            for base in node.all_input_nodes:
                # Note: a write inside the region comes before what it writes to.
                while base in self.views and (
                    region is None or self._region_of.get(base) is not region
                ):
                    base = self.views[base]
                if self._region_of.get(base) is not region:
                    used_nodes.add(base)
        for node, region in self._region_of.items():
            if node in used_nodes:
                region.outputs.append(node)


def _unit_begins(graph: fx.Graph) -> Iterator[fx.Node]:
    unit_before = None
    for section in sections_of(graph):
        if section.phase != "update" and section.unit is not None:
            if unit_before is not None and section.unit != unit_before:
                yield section.nodes[0]
            unit_before = section.unit


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return value is not None and not isinstance(value, torch.Tensor | tuple | list)


# --- a region as a graph --------------------------------------------------------------------------


def region_graph(region: Region, cut: Cut) -> fx.Graph:
    """Return a region as a graph."""
    graph = fx.Graph()
    copy_of = dict[fx.Node, fx.Node]()
    for input_index, node in enumerate(region.inputs):
        copy_of[node] = graph.placeholder(f"in{input_index}")
        copy_of[node].meta["val"] = node.meta["val"]
    copy = viewer(graph, cut, copy_of)
    for node in region.nodes:
        copy_of[node] = graph.node_copy(node, copy)
    graph.output([copy_of[node] for node in region.outputs])
    for node_index, node in enumerate(graph.nodes):
        node.name = f"n{node_index}"  # so that equal regions have equal texts
    return graph


def viewer(
    graph: fx.Graph, cut: Cut, copies: dict[fx.Node, fx.Node]
) -> Callable[[fx.Node], fx.Node]:
    """Return a function from a node to its copy in another graph.

    It makes views in as few operations as possible.
    """

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = view(node)
        return copies[node]

    def view(node: fx.Node) -> fx.Node:
        base = cut.behind(node)
        view_value, base_value = node.meta["val"], base.meta["val"]
        # Note: the result of a split is a tuple, and a view of another dtype needs its own
        # operation.
        if (
            isinstance(view_value, torch.Tensor)
            and isinstance(base_value, torch.Tensor)
            and view_value.dtype == base_value.dtype
        ):
            if layout_of(view_value) == layout_of(base_value):
                return copy(base)
            # Why: a chain of views then is one call, in each step.
            is_reshaped = view_value.numel() == base_value.numel()
            if is_reshaped and view_value.is_contiguous() and base_value.is_contiguous():
                return graph.call_function(
                    torch.ops.aten.view.default, (copy(base), list(view_value.shape))
                )
        if written_by(node):  # done by another region, in the memory that the node views
            return copy(cut.views[node])
        return graph.node_copy(node, copy)

    return copy


def region_text(graph: fx.Graph) -> str:
    """Return a region's graph as text: all that its compiled function depends on."""
    lines = []
    for node in graph.nodes:
        lines.append(str(node.format_node()))
        if node.op == "placeholder":
            lines.append(str(layout_of(node.meta["val"])))
    return "\n".join(lines)


# --- compiled regions -----------------------------------------------------------------------------


class CompilingBind:
    """Make graphs functions, and compile equal regions once."""

    def __init__(self, backend: Backend) -> None:
        if not isinstance(backend, str) and not callable(backend):
            raise TypeError(
                "compile takes the name of a backend of torch.compile, or a function; found "
                f'{type(backend).__name__}: pass backend="inductor"'
            )
        self.backend = find_backend(backend)
        self._compiled: dict[str, Boxed] = {}

    def __call__(self, step_graph: StepGraph, mesh: Mesh) -> Callable[..., list[Any]]:
        if step_graph.sizes:
            return self._bind_sizes(step_graph, mesh)
        cut = Cut(step_graph.graph)
        region_graphs = {
            step: region_graph(step, cut) for step in cut.steps if isinstance(step, Region)
        }
        code_of_region = {
            region: region_text(graph) for region, graph in region_graphs.items()
        }
        # Note: equal texts mean equal code, so one compiled function serves all of them.
        graph_by_text = {
            code_of_region[region]: graph for region, graph in region_graphs.items()
        }
        unique_texts = list(graph_by_text)
        # Why rotated: ranks that compile at once find each other's results in Inductor's cache.
        first_index = len(unique_texts) * mesh.rank // mesh.world_size
        for region_code in unique_texts[first_index:] + unique_texts[:first_index]:
            self._compile(region_code, graph_by_text[region_code])
        calls = {
            region: self._compiled[region_code]
            for region, region_code in code_of_region.items()
        }
        graph = _schedule(step_graph, mesh, cut, calls)
        return fx.GraphModule(dict(step_graph.constants), graph).forward

    def _bind_sizes(self, step_graph: StepGraph, mesh: Mesh) -> Callable[..., list[Any]]:
        """Return a graph for any size as a function that compiles for each size that comes."""
        dim_of_name: dict[str, tuple[int, int]] = {}  # an input of the graph, and its dim
        for input_index, leaf_index in enumerate(step_graph.inputs):
            leaf_facts: Any = step_graph.signature.leaves[leaf_index]
            for dim, size in (
                enumerate(leaf_facts[0]) if isinstance(leaf_facts, tuple) else ()
            ):
                if isinstance(size, str):
                    dim_of_name.setdefault(size, (input_index, dim))

        @functools.cache
        def run_of(sizes: tuple[int, ...]) -> Callable[..., list[Any]]:
            size_of_name = dict(zip(dim_of_name, sizes, strict=True))
            _log.debug(
                "compile compiles a step for %s; it has compiled %d sizes",
                size_of_name,
                run_of.cache_info().currsize + 1,
            )
            return self(_with_fixed_sizes(step_graph, size_of_name), mesh)

        def run(*inputs: Any) -> list[Any]:
            sizes = tuple([inputs[index].shape[dim] for index, dim in dim_of_name.values()])
            return run_of(sizes)(*inputs)

        # Why at once: compiling takes long, and belongs to the call of ``compile``.
        run_of(tuple(step_graph.sizes[name] for name in dim_of_name))
        return run

    def _compile(self, text: str, graph: fx.Graph) -> None:
        with _compiling:
            # Note: another recording, or another rank of a simulation, may have compiled it
            # meanwhile.
            if text in self._compiled:
                return
            start_time = time.perf_counter()
            # Note: a region takes all tensors as inputs, so its module has no attributes.
            region_module = fx.GraphModule(torch.nn.Module(), graph)
            example_inputs = [
                node.meta["val"] for node in graph.find_nodes(op="placeholder")
            ]
            run: Boxed
            if isinstance(self.backend, str):
                run = inductor(region_module, example_inputs)
            else:
                run = compile_with(self.backend, region_module, example_inputs)

            def region(inputs: list[torch.Tensor]) -> Any:
                return run(inputs)  # Why a function: fx calls nothing without a name

            self._compiled[text] = region
            _log.debug(
                "compile: a region of %d operations took %.1f s",
                len(graph.nodes),
                time.perf_counter() - start_time,
            )


def _with_fixed_sizes(step_graph: StepGraph, sizes: Mapping[str, int]) -> StepGraph:
    """Return a graph for any size with numbers in place of its sizes."""
    filled_graph = filled(step_graph, sizes)
    for node in list(filled_graph.graph.nodes):
        node_value = node.meta.get("val")
        is_number = node.op == "call_function" and type(node_value) in (int, float, bool)
        if is_number and not collective_of(node):
            put_number(node, node_value)
            filled_graph.graph.erase_node(node)
    return dataclasses.replace(filled_graph, sizes={}, conditions=Conditions())


# --- the calls of a step --------------------------------------------------------------------------


def _schedule(
    step_graph: StepGraph, mesh: Mesh, cut: Cut, calls: dict[Region, Boxed]
) -> fx.Graph:
    storages = GraphStorages.find(step_graph.graph)
    graph = fx.Graph()
    copy_of = dict[fx.Node, fx.Node]()
    copy = viewer(graph, cut, copy_of)
    for step in cut.steps:
        if isinstance(step, Region):
            # Why a call: after it the list alone holds the inputs, so the region can free them.
            boxed_inputs = graph.call_function(_boxed, tuple(map(copy, step.inputs)))
            region_call = graph.call_function(calls[step], (boxed_inputs,))
            for output_index, node in enumerate(step.outputs):
                copy_of[node] = graph.call_function(
                    operator.getitem, (region_call, output_index)
                )
                copy_of[node].meta["val"] = node.meta["val"]
        else:
            copy_of[step] = graph.node_copy(step, copy)
            lower(step, copy_of[step], step_graph, mesh, storages)
    output_nodes: Any = step_graph.graph.output_node().args[0]
    graph.output(fx.node.map_arg(output_nodes, copy))
    return graph


def _boxed(*inputs: torch.Tensor) -> list[torch.Tensor]:
    return list(inputs)
