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

from funcshard._utils import Boxed, compile_with, find_backend, inductor, put_number
from funcshard.comm import Mesh
from funcshard.graph.compiling.regions import Cut, Region, region_graph, region_text
from funcshard.graph.compiling.schedule import CompiledRegion, as_function
from funcshard.graph.conditions import Conditions
from funcshard.graph.effects import written_by
from funcshard.graph.filling import filled
from funcshard.graph.replay import lower
from funcshard.graph.step_graph import StepGraph, collective_of
from funcshard.graph.storages import GraphStorages

_log = logging.getLogger("funcshard.graph")
# Why one for all: torch's compilers keep state of the process, and simulated ranks are threads.
_compiling = threading.RLock()

Backend = str | Callable[..., Any]


class Compiled:
    """A graph as a function, whose regions are compiled.

    Attributes:
        graph: the calls that run: collectives, other ordinary calls, and compiled regions.
    """

    def __init__(self, graph: fx.Graph, constants: dict[str, torch.Tensor]) -> None:
        self.graph = graph
        self._run = as_function(graph, constants)

    def __call__(self, *inputs: Any) -> list[Any]:
        return self._run(*inputs)


class CompilingBind:
    """Make graphs functions, and compile equal regions once.

    Arguments:
        backend: a backend of ``torch.compile``, as a name or a function.
    """

    def __init__(self, backend: Backend) -> None:
        if not isinstance(backend, str) and not callable(backend):
            raise TypeError(
                "compile takes the name of a backend of torch.compile, or a function; found "
                f'{type(backend).__name__}: pass backend="inductor"'
            )
        self.backend = find_backend(backend)
        self._compiled: dict[str, Boxed] = {}

    def __call__(self, step_graph: StepGraph, mesh: Mesh) -> Callable[..., list[Any]]:
        """Return a graph as a function that runs on a mesh."""
        if step_graph.sizes:
            return self._bind_sizes(step_graph, mesh)
        cut = Cut(step_graph.graph)
        graphs = {step: region_graph(step, cut) for step in cut.steps if isinstance(step, Region)}
        texts = {region: region_text(graph) for region, graph in graphs.items()}
        graph_by_text = {texts[region]: graph for region, graph in graphs.items()}
        unique_texts = list(graph_by_text)
        # Why rotated: ranks that compile at once find each other's results in Inductor's cache.
        begin = len(unique_texts) * mesh.rank // mesh.world_size
        for text in unique_texts[begin:] + unique_texts[:begin]:
            self._compile(text, graph_by_text[text])
        calls = {region: CompiledRegion(self._compiled[text]) for region, text in texts.items()}
        return Compiled(_schedule(step_graph, mesh, cut, calls), dict(step_graph.constants))

    def _bind_sizes(self, step_graph: StepGraph, mesh: Mesh) -> Callable[..., list[Any]]:
        """Return a graph for any size as a function, which is compiled for each size that comes."""
        dim_of_name: dict[str, tuple[int, int]] = {}  # an input of the graph, and its dim
        for input_index, leaf_index in enumerate(step_graph.inputs):
            leaf: Any = step_graph.signature.leaves[leaf_index]
            for dim, size in enumerate(leaf[0]) if isinstance(leaf, tuple) else ():
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
            if text in self._compiled:
                return
            start = time.perf_counter()
            module = fx.GraphModule(torch.nn.Module(), graph)
            examples = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
            if isinstance(self.backend, str):
                self._compiled[text] = inductor(module, examples)
            else:
                self._compiled[text] = compile_with(self.backend, module, examples)
            _log.debug(
                "compile: a region of %d operations took %.1f s",
                len(graph.nodes),
                time.perf_counter() - start,
            )


def _with_fixed_sizes(step_graph: StepGraph, sizes: Mapping[str, int]) -> StepGraph:
    """Return a graph for any size as a graph for some sizes, which are numbers in it."""
    filled_graph = filled(step_graph, sizes)
    for node in list(filled_graph.graph.nodes):
        value = node.meta.get("val")
        is_number = node.op == "call_function" and type(value) in (int, float, bool)
        if is_number and not collective_of(node):
            put_number(node, value)
            filled_graph.graph.erase_node(node)
    return dataclasses.replace(filled_graph, sizes={}, conditions=Conditions())


# --- the calls of a step --------------------------------------------------------------------------


def _schedule(
    step_graph: StepGraph, mesh: Mesh, cut: Cut, calls: dict[Region, CompiledRegion]
) -> fx.Graph:
    """Return the graph of all calls of a step."""
    storages = GraphStorages.find(step_graph.graph)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for step in cut.steps:
        if isinstance(step, Region):
            inputs = [_view_in(graph, node, cut, copies) for node in step.inputs]
            call = graph.call_function(calls[step], (inputs,))
            for output_index, node in enumerate(step.outputs):
                copies[node] = graph.call_function(operator.getitem, (call, output_index))
                copies[node].meta["val"] = node.meta["val"]
        else:
            copies[step] = graph.node_copy(step, lambda node: _view_in(graph, node, cut, copies))
            lower(step, copies[step], step_graph, mesh, storages)
    outputs: Any = step_graph.graph.output_node().args[0]
    graph.output(fx.node.map_arg(outputs, lambda node: _view_in(graph, node, cut, copies)))
    return graph


def _view_in(graph: fx.Graph, node: fx.Node, cut: Cut, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return the copy of a node, or of a view that takes as few operations as possible."""
    if node not in copies:
        copies[node] = _short_view(graph, node, cut, copies)
    return copies[node]


def _short_view(
    graph: fx.Graph, node: fx.Node, cut: Cut, copies: dict[fx.Node, fx.Node]
) -> fx.Node:
    base = cut.behind(node)
    view, whole = node.meta["val"], base.meta["val"]
    # Note: the result of a split is a tuple, and a view of another dtype needs its own operation.
    if (
        isinstance(view, torch.Tensor)
        and isinstance(whole, torch.Tensor)
        and view.dtype == whole.dtype
    ):
        if _layout(view) == _layout(whole):
            return _view_in(graph, base, cut, copies)
        is_reshaped = view.numel() == whole.numel()
        if is_reshaped and view.is_contiguous() and whole.is_contiguous():
            viewed = _view_in(graph, base, cut, copies)
            return graph.call_function(torch.ops.aten.view.default, (viewed, list(view.shape)))
    if written_by(node):
        return _view_in(graph, cut.views[node], cut, copies)
    return graph.node_copy(node, lambda viewed: _view_in(graph, viewed, cut, copies))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()
