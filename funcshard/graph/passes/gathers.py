"""The gathered buffers of units in a graph: where each comes from, and which nodes use it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from funcshard.graph.effects import is_pure, written_by, written_storages
from funcshard.graph.step_graph import collective_of, starts_and_waits
from funcshard.graph.storages import GraphStorages


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """One gathered buffer of a unit.

    Attributes:
        start: the node that starts the all-gather.
        wait: the node that waits for it, and makes the buffer.
        payload: the data that this rank sends.
        bytes: the size of the buffer.
    """

    start: fx.Node
    wait: fx.Node
    payload: fx.Node
    bytes: int

    @property
    def key(self) -> Hashable:
        """The data and the ranks of a gather; two gathers with equal results have equal keys."""
        event = self.start.meta["event"]
        return event.unit, event.buffer, *self.start.args[4:6], _value_of(self.payload)

    def payload_nodes(self) -> list[fx.Node]:
        """Return the nodes that make the payload of inputs of the graph, in order."""
        payload: dict[fx.Node, None] = {}

        def visit(node: fx.Node) -> None:
            if node not in payload and is_pure(node):
                for input_node in node.all_input_nodes:
                    visit(input_node)
                payload[node] = None

        visit(self.payload)
        return list(payload)


def _value_of(value: Any) -> Hashable:
    """Return how an argument is computed; equal for equal computations of the same inputs."""
    if isinstance(value, fx.Node) and is_pure(value):
        return value.target, _value_of(value.args), _value_of(value.kwargs)
    if isinstance(value, Mapping):
        return tuple((key, _value_of(item)) for key, item in value.items())
    values: Hashable = tuple(map(_value_of, value)) if isinstance(value, tuple | list) else value
    return values


def gathered_buffers(graph: fx.Graph, storages: GraphStorages) -> list[Gathered]:
    """Return the gathered buffers of all units, in the order of their collectives.

    A gather is left out if its data comes from another one, as with ``reshard_after_forward=n``.
    """
    buffers = []
    for start, (wait,) in starts_and_waits(graph):
        event = start.meta.get("event")
        payload: Any = start.args[0]
        of_unit = event is not None and event.unit is not None
        if of_unit and collective_of(start) == "all_gather" and _is_from_inputs(payload, storages):
            (storage,) = storages.of[wait]
            buffers.append(Gathered(start, wait, payload, storages.bytes[storage]))
    return buffers


def _is_from_inputs(payload: fx.Node, storages: GraphStorages) -> bool:
    """Return whether data is computed from inputs of the graph alone, in separate memory."""
    waiting = [payload]
    while waiting:
        node = waiting.pop()
        if node.op == "call_function":
            own_storages = {
                storage for storage in storages.of[node] if storages.made[storage] is node
            }
            written = any(
                written_storages(user, storages) & own_storages
                for storage in own_storages
                for user in storages.users[storage]
            )
            if written or not is_pure(node):
                return False
            waiting += node.all_input_nodes
    return True


def uses_of(base: fx.Node, storages: GraphStorages) -> list[fx.Node]:
    """Return the nodes that read or write the memory behind a node, through views of it too.

    They come in order. Views themselves do not count.
    """
    (storage,) = storages.of[base]
    return [user for user in storages.users[storage] if not _only_views(user, storage, storages)]


def _only_views(user: fx.Node, storage: int, storages: GraphStorages) -> bool:
    if collective_of(user) == "wait":
        return True
    return user.op == "call_function" and storages.of[user] == (storage,) and not written_by(user)
