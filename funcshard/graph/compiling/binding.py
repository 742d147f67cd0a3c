"""``compiled``: a way to run graphs whose regions are compiled."""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from funcshard._utils import Boxed, compile_with, find_backend, inductor
from funcshard.comm import Mesh
from funcshard.graph.compiling.by_size import BySize
from funcshard.graph.compiling.region_code import region_graph, region_text
from funcshard.graph.compiling.regions import Cut, Region, writes
from funcshard.graph.compiling.schedule import CompiledRegion, as_function
from funcshard.graph.replay import lower
from funcshard.graph.step_graph import StepGraph
from funcshard.graph.storages import GraphStorages
from funcshard.plan import Event

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

    @property
    def events(self) -> tuple[Event, ...]:
        """The event of each collective that starts, in order."""
        return tuple(
            node.meta["event"] for node in self.graph.nodes if node.meta.get("event") is not None
        )

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
                f"{type(backend).__name__}: "
                f'pass backend="inductor"'
            )
        self.backend = find_backend(backend)
        self._compiled: dict[str, Boxed] = {}

    def __call__(self, step_graph: StepGraph, mesh: Mesh) -> Compiled | BySize:
        """Return a graph as a function that runs on a mesh."""
        if step_graph.sizes:
            return BySize(step_graph, partial(self._bound, mesh=mesh))
        return self._bound(step_graph, mesh)

    def _bound(self, step_graph: StepGraph, mesh: Mesh) -> Compiled:
        cut = Cut.find(step_graph.graph)
        codes: dict[Region, tuple[fx.Graph, str]] = {}
        for step in cut.steps:
            if isinstance(step, Region):
                graph = region_graph(step, cut)
                codes[step] = graph, region_text(graph)
        texts = list(dict.fromkeys(code_text for _, code_text in codes.values()))
        # Why rotated: ranks that compile at once find each other's results in Inductor's cache.
        begin = len(texts) * mesh.rank // mesh.world_size
        graphs = {code_text: graph for graph, code_text in codes.values()}
        for code_text in texts[begin:] + texts[:begin]:
            self._compile(code_text, graphs[code_text])
        calls = {
            region: CompiledRegion(self._compiled[code_text], code_text)
            for region, (_, code_text) in codes.items()
        }
        return Compiled(_schedule(step_graph, mesh, cut, calls), dict(step_graph.constants))

    def _compile(self, text: str, graph: fx.Graph) -> None:
        with _compiling:
            if text in self._compiled:
                return
            start = time.perf_counter()
            module = fx.GraphModule(torch.nn.Module(), graph)
            like = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
            backend = self.backend
            self._compiled[text] = (
                inductor(module, like)
                if isinstance(backend, str)
                else compile_with(backend, module, like)
            )
            _log.debug(
                "compile: a region of %d operations took %.1f s",
                len(graph.nodes),
                time.perf_counter() - start,
            )


def _schedule(
    step_graph: StepGraph, mesh: Mesh, cut: Cut, calls: dict[Region, CompiledRegion]
) -> fx.Graph:
    """Return the graph of all calls of a step."""
    storages = GraphStorages.find(step_graph.graph)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def value(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = _view(node, cut, graph, value)
        return copies[node]

    for step in cut.steps:
        if isinstance(step, Region):
            call = graph.call_function(calls[step], ([value(node) for node in step.inputs],))
            for output_index, node in enumerate(step.outputs):
                copies[node] = graph.call_function(operator.getitem, (call, output_index))
                copies[node].meta["val"] = node.meta["val"]
        else:
            copies[step] = graph.node_copy(step, value)
            lower(step, copies[step], step_graph, mesh, storages)
    (output,) = [node for node in step_graph.graph.nodes if node.op == "output"]
    graph.output(
        [
            value(result_node) if isinstance(result_node, fx.Node) else result_node
            for result_node in output.args[0]
        ]
    )
    return graph


def _view(node: fx.Node, cut: Cut, graph: fx.Graph, value: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """Return a view for an ordinary call, with as few operations as possible."""
    base = cut.behind(node)
    view_value, base_value = node.meta["val"], base.meta["val"]
    if (
        isinstance(view_value, torch.Tensor)
        and isinstance(base_value, torch.Tensor)
        and view_value.dtype == base_value.dtype
    ):
        if (view_value.shape, view_value.stride(), view_value.storage_offset()) == (
            base_value.shape,
            base_value.stride(),
            base_value.storage_offset(),
        ):
            return value(base)
        if (
            view_value.is_contiguous()
            and base_value.is_contiguous()
            and view_value.numel() == base_value.numel()
        ):
            return graph.call_function(
                torch.ops.aten.view.default, (value(base), list(view_value.shape))
            )
    if writes(node):
        return value(cut.views[node])
    return graph.node_copy(node, value)
