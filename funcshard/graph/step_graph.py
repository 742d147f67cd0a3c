"""The graph of one step, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from funcshard._utils.torch_operators import operator_name
from funcshard.graph.signatures import Conditions, Signature
from funcshard.plan import Event

# The operations that start a collective.
STARTS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")


class Place(NamedTuple):
    """A leaf of the results: a number among the graph's outputs."""

    number: int


class Constant(NamedTuple):
    """A leaf of the results that's the same in every call."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class StepGraph:
    """The operations of one step in order: operators of torch and of ``funcshard``.

    ``meta["event"]`` has the event of a collective's start, ``meta["val"]`` the form of a result.

    Attributes:
        graph: the operations; its placeholders are tensors and counters of ``(state, batch)``.
        inputs: the number of each placeholder among the arguments' leaves.
        results: each leaf of ``(state, metrics)``.
        donated: numbers of the leaves of the arguments that the step takes over.
        spent: the keys that lead to each optimizer state that the step takes over.
        constants: tensors that the step makes of numbers, as ``torch.tensor([1, 2])`` does.
        numbers: functions of the number of steps, such as schedules.
        replayable: whether the graph may replace the step; see ``StepRecording``.
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
        """Return the same graph with new nodes, for a pass to change."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        # Note: graph_copy copies meta with each node, and returns the output's argument.
        graph.output(graph.graph_copy(self.graph, copies))
        return dataclasses.replace(self, graph=graph)

    @property
    def events(self) -> tuple[Event, ...]:
        """The collectives that start in the graph, in order."""
        graph_events = [
            node.meta.get("event") for node in self.graph.nodes if collective_of(node) in STARTS
        ]
        return tuple(event for event in graph_events if event is not None)


def collective_of(node: fx.Node) -> str:
    """Return the name of ``funcshard``'s operation in a node, or ``""``.

    It's one of ``STARTS`` for the start of a collective; ``"wait"`` for its end; ``"number"`` for
    the result of a schedule; ``"coordinate"`` for this rank's index on an axis; ``"random_state"``
    or ``"set_random_state"``.
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
