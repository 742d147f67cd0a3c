"""``StepGraph``: the operations of one step, and how its arguments and results belong to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from funcshard._utils.torch_operators import operator_name
from funcshard.graph.named_sizes import Conditions
from funcshard.graph.signatures import Signature
from funcshard.plan import Event

# The operations that start a collective.
STARTS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")


class Place(NamedTuple):
    """A leaf of the results that the graph computes, by its number among the graph's outputs."""

    number: int


class Constant(NamedTuple):
    """A leaf of the results that is the same in every call."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class StepGraph:
    """The operations of one step in order: torch's operators, and ``funcshard``'s collectives.

    The node of a collective's start has its event in ``meta["event"]``. Every node has the form of
    its result in ``meta["val"]``, a tensor without data or a number.

    Attributes:
        graph: the operations. Its placeholders are the tensors and counters among the leaves of
            ``(state, batch)``; its output is a list.
        signature: see ``signatures``; the graph fits arguments of this signature only.
        inputs: the number of each placeholder among the leaves of the arguments.
        results: each leaf of ``(state, metrics)``.
        form: the form of ``(state, metrics)``.
        donated: numbers of the leaves of the arguments that the step takes over.
        spent: the keys that lead to each optimizer state that the step takes over.
        constants: the tensors that the step makes of numbers, such as ``torch.tensor([1, 2])``.
        numbers: the functions whose results are numbers of the graph, such as schedules.
        replayable: whether a run of the graph may replace the step; see ``StepRecording``.
        sizes: the size of each named dim, with which the forms in ``meta["val"]`` were made; empty
            if all sizes are fixed.
        conditions: the rules that other sizes have to fulfil.
    """

    graph: fx.Graph
    signature: Signature
    inputs: tuple[int, ...]
    results: tuple[Place | Constant, ...]
    form: Any
    donated: tuple[int, ...]
    spent: tuple[tuple[Any, ...], ...]
    constants: Mapping[str, torch.Tensor]
    numbers: tuple[Callable[[int], float], ...]
    replayable: bool
    sizes: Mapping[str, int] = field(default_factory=dict)
    conditions: Conditions = field(default_factory=Conditions)

    def copy(self) -> StepGraph:
        """Return the same graph with its own nodes, for a pass to change."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        # Note: graph_copy copies meta with each node, and returns the output's argument.
        graph.output(graph.graph_copy(self.graph, copies))
        return dataclasses.replace(self, graph=graph)

    @property
    def events(self) -> tuple[Event, ...]:
        """The event of each collective that starts in the graph, in order."""
        graph_events = [
            node.meta.get("event") for node in self.graph.nodes if collective_of(node) in STARTS
        ]
        return tuple(event for event in graph_events if event is not None)


def collective_of(node: fx.Node) -> str:
    """Return the name of ``funcshard``'s operation in a node; ``""`` for every other node.

    It is ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"broadcast"`` or
    ``"all_to_all"`` for the start of a collective; ``"wait"`` for its end; ``"number"`` for a
    number that a schedule computes; ``"coordinate"`` for the number of this rank along an axis;
    ``"random_state"`` or ``"set_random_state"``.
    """
    space, _, name = operator_name(node.target).partition("::")
    return name if space == "funcshard" else ""


def is_unit_gather(node: fx.Node) -> bool:
    """Return whether a node starts the all-gather of a unit."""
    event = node.meta.get("event")
    return collective_of(node) == "all_gather" and event is not None and event.unit is not None


def starts_and_waits(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield the start of each collective, with the nodes that wait for it."""
    for node in graph.nodes:
        if collective_of(node) in STARTS:
            yield node, [user for user in node.users if collective_of(user) == "wait"]
