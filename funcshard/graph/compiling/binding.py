"""``CompilingBind``: a way to run graphs whose regions are compiled."""

from __future__ import annotations

import dataclasses
import logging
import operator
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from funcshard._utils.torch_compilers import Boxed, compile_with, find_backend, inductor
from funcshard._utils.torch_symbols import put_number
from funcshard.comm import Mesh
from funcshard.graph.compiling.regions import Cut, Region, region_graph, region_text, view_in
from funcshard.graph.filling import filled
from funcshard.graph.replay import lower
from funcshard.graph.signatures import Conditions
from funcshard.graph.step_graph import StepGraph, collective_of
from funcshard.graph.storages import GraphStorages

_log = logging.getLogger("funcshard.graph")
# Why one for all: torch's compilers keep state of the process, and simulated ranks are threads.
_compiling = threading.RLock()

Backend = str | Callable[..., Any]


class CompiledRegion:
    """The call of a compiled region; its only argument is a list, which it empties."""

    __name__ = "region"

    def __init__(self, run: Boxed) -> None:
        self.run = run

    def __call__(self, inputs: list[torch.Tensor]) -> Any:
        return self.run(inputs)


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
        code_of_region = {region: region_text(graph) for region, graph in region_graphs.items()}
        # Note: equal texts mean equal code, so one compiled function serves all of them.
        graph_by_text = {code_of_region[region]: graph for region, graph in region_graphs.items()}
        unique_texts = list(graph_by_text)
        # Why rotated: ranks that compile at once find each other's results in Inductor's cache.
        first_index = len(unique_texts) * mesh.rank // mesh.world_size
        for region_code in unique_texts[first_index:] + unique_texts[:first_index]:
            self._compile(region_code, graph_by_text[region_code])
        calls = {
            region: CompiledRegion(self._compiled[region_code])
            for region, region_code in code_of_region.items()
        }
        graph = _schedule(step_graph, mesh, cut, calls)
        return fx.GraphModule(dict(step_graph.constants), graph).forward

    def _bind_sizes(self, step_graph: StepGraph, mesh: Mesh) -> Callable[..., list[Any]]:
        """Return a graph for any size as a function that compiles for each size that comes."""
        dim_of_name: dict[str, tuple[int, int]] = {}  # an input of the graph, and its dim
        for input_index, leaf_index in enumerate(step_graph.inputs):
            leaf_facts: Any = step_graph.signature.leaves[leaf_index]
            for dim, size in enumerate(leaf_facts[0]) if isinstance(leaf_facts, tuple) else ():
                if isinstance(size, str):
                    dim_of_name.setdefault(size, (input_index, dim))
        own_sizes = tuple(step_graph.sizes[name] for name in dim_of_name)
        # Why at once: compiling takes long, and belongs to the call of ``compile``.
        run_of_sizes = {own_sizes: self(_with_fixed_sizes(step_graph, step_graph.sizes), mesh)}

        def run(*inputs: Any) -> list[Any]:
            sizes = tuple([inputs[index].shape[dim] for index, dim in dim_of_name.values()])
            if sizes not in run_of_sizes:
                size_of_name = dict(zip(dim_of_name, sizes, strict=True))
                _log.debug(
                    "compile compiles a step for %s; it has compiled %d sizes",
                    size_of_name,
                    len(run_of_sizes) + 1,
                )
                run_of_sizes[sizes] = self(_with_fixed_sizes(step_graph, size_of_name), mesh)
            return run_of_sizes[sizes](*inputs)

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
            example_inputs = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
            if isinstance(self.backend, str):
                self._compiled[text] = inductor(region_module, example_inputs)
            else:
                self._compiled[text] = compile_with(self.backend, region_module, example_inputs)
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
    step_graph: StepGraph, mesh: Mesh, cut: Cut, calls: dict[Region, CompiledRegion]
) -> fx.Graph:
    storages = GraphStorages.find(step_graph.graph)
    graph = fx.Graph()
    copy_of: dict[fx.Node, fx.Node] = {}
    for step in cut.steps:
        if isinstance(step, Region):
            region_inputs = [view_in(graph, node, cut, copy_of) for node in step.inputs]
            # Why a call: after it the list alone holds the inputs, so the region can free them.
            boxed_inputs = graph.call_function(_boxed, tuple(region_inputs))
            region_call = graph.call_function(calls[step], (boxed_inputs,))
            for output_index, node in enumerate(step.outputs):
                copy_of[node] = graph.call_function(operator.getitem, (region_call, output_index))
                copy_of[node].meta["val"] = node.meta["val"]
        else:
            copy_of[step] = graph.node_copy(step, lambda node: view_in(graph, node, cut, copy_of))
            lower(step, copy_of[step], step_graph, mesh, storages)
    output_nodes: Any = step_graph.graph.output_node().args[0]
    graph.output(fx.node.map_arg(output_nodes, lambda node: view_in(graph, node, cut, copy_of)))
    return graph


def _boxed(*inputs: torch.Tensor) -> list[torch.Tensor]:
    return list(inputs)
