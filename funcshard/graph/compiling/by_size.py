"""``BySize``: a graph for any size as a function, which is compiled for each size that comes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from torch import fx

from funcshard._utils import put_number
from funcshard.graph.conditions import Conditions
from funcshard.graph.filling import filled
from funcshard.graph.step_graph import StepGraph, collective_of
from funcshard.plan import Event

_log = logging.getLogger("funcshard.graph")


class BySize:
    """A graph for any size as a function, which is compiled for each size that comes.

    Arguments:
        step_graph: the graph. It is compiled for its own sizes at once.
        make: makes a graph of fixed sizes a function.
    """

    def __init__(self, step_graph: StepGraph, make: Callable[[StepGraph], Any]) -> None:
        self._step_graph, self._make = step_graph, make
        leaves = [step_graph.signature.leaves[i] for i in step_graph.inputs]
        size_places: dict[
            str, tuple[int, int]
        ] = {}  # of each name, an input and its dim of that size
        for leaf_index, leaf in enumerate(leaves):
            for dim, name in enumerate(leaf[0]) if isinstance(leaf, tuple) else ():
                if isinstance(name, str):
                    size_places.setdefault(name, (leaf_index, dim))
        self._where = tuple(size_places.items())
        recorded_sizes = tuple(step_graph.sizes[name] for name in size_places)
        self._first = make(fixed(step_graph, dict(step_graph.sizes)))
        self._made = {recorded_sizes: self._first}

    @property
    def graph(self) -> fx.Graph:
        """The calls that run for the sizes of the recording."""
        first_graph: fx.Graph = self._first.graph
        return first_graph

    @property
    def events(self) -> tuple[Event, ...]:
        """The event of each collective that starts, in order, which no size changes."""
        first_events: tuple[Event, ...] = self._first.events
        return first_events

    def __call__(self, *inputs: Any) -> list[Any]:
        sizes = tuple([inputs[input_index].shape[dim] for _, (input_index, dim) in self._where])
        run = self._made.get(sizes)
        if run is None:
            named = {name: size for (name, _), size in zip(self._where, sizes, strict=True)}
            _log.debug(
                "compile compiles a step for %s; it has compiled %d sizes",
                named,
                len(self._made) + 1,
            )
            run = self._made[sizes] = self._make(fixed(self._step_graph, named))
        step_results: list[Any] = run(*inputs)
        return step_results


def fixed(step_graph: StepGraph, sizes: dict[str, int]) -> StepGraph:
    """Return a graph for any size as a graph for some sizes, which are numbers in it."""
    filled_graph = filled(step_graph, sizes)
    graph = filled_graph.graph
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if (
            node.op == "call_function"
            and type(value) in (int, float, bool)
            and not collective_of(node)
        ):
            put_number(node, value)
            graph.erase_node(node)
    return dataclasses.replace(filled_graph, sizes={}, conditions=Conditions())
