"""The gathered buffers of units in a graph: where each comes from, and which nodes use it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from funcshard._utils import operator_name, tree
from funcshard.graph.effects import is_pure, written_by, written_storages
from funcshard.graph.step_graph import Place, StepGraph, collective_of, starts_and_waits
from funcshard.graph.storages import GraphStorages


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """One buffer of a unit, gathered by its own collective or a bucket's.

    Attributes:
        unit: name of the unit.
        buffer: key of the buffer.
        start: the node that starts the all-gather.
        wait: the node that waits for it.
        payload: the data that this rank sends.
        part: the node of the payload that represents this buffer alone: the payload itself, or one
            of the parts of a bucket, before they are put together.
        whole: the node that puts the parts of a bucket together; the payload without a bucket.
        base: the node that makes the buffer: the wait, or the memory that a bucket's result is
            copied to.
        bytes: the size of the buffer.
    """

    unit: str
    buffer: str
    start: fx.Node
    wait: fx.Node
    payload: fx.Node
    part: fx.Node
    whole: fx.Node
    base: fx.Node
    bytes: int

    @property
    def key(self) -> Hashable:
        """The data and the ranks of a gather; two gathers with equal results have equal keys."""
        return self.unit, self.buffer, *self.start.args[4:6], self._value_of(self.payload)

    def payload_nodes(self) -> list[fx.Node]:
        """Return the nodes that make the payload of inputs of the graph, in order."""
        payload: dict[fx.Node, None] = {}

        def visit(node: fx.Node) -> None:
            node = self.part if node is self.whole else node
            if node not in payload and is_pure(node):
                for input_node in node.all_input_nodes:
                    visit(input_node)
                payload[node] = None

        visit(self.payload)
        return list(payload)

    def _value_of(self, value: Any) -> Hashable:
        """Return how an argument is computed; equal for equal computations of the same inputs."""
        if isinstance(value, fx.Node):
            value = self.part if value is self.whole else value
            return (
                (value.target, self._value_of(value.args), self._value_of(value.kwargs))
                if is_pure(value)
                else value
            )
        if isinstance(value, Mapping):
            return tuple((key, self._value_of(item)) for key, item in value.items())
        node_value: Hashable = (
            tuple(map(self._value_of, value)) if isinstance(value, tuple | list) else value
        )
        return node_value


def gathered_buffers(graph: fx.Graph, storages: GraphStorages) -> list[Gathered]:
    """Return the gathered buffers of all units, in the order of their collectives.

    A gather is left out if its data comes from another one, as with ``reshard_after_forward=n``.
    """
    return [
        gathered_buffer
        for start, (wait,) in starts_and_waits(graph)
        for gathered_buffer in _buffers_of(start, wait, storages)
    ]


def _buffers_of(start: fx.Node, wait: fx.Node, storages: GraphStorages) -> Iterator[Gathered]:
    event = start.meta.get("event")
    if collective_of(start) != "all_gather" or event is None or event.unit is None:
        return
    payload: Any = start.args[0]
    if not _is_from_inputs(payload, storages):
        return
    units, split = event.unit.split(" + "), _split_of(wait)
    if split is None:
        (storage,) = storages.of[wait]
        yield Gathered(
            event.unit,
            event.buffer,
            start,
            wait,
            payload,
            payload,
            payload,
            wait,
            storages.bytes[storage],
        )
        return
    outs: Any = split.kwargs["out"]
    whole_node = payload
    while operator_name(whole_node.target) != "aten::cat":  # a conversion of the dtype
        (whole_node,) = whole_node.all_input_nodes
    parts: Any = whole_node.args[0]
    for unit, part, out in zip(units, parts, outs, strict=True):
        (base,) = out.all_input_nodes
        (storage,) = storages.of[base]
        yield Gathered(
            unit,
            event.buffer,
            start,
            wait,
            payload,
            part,
            whole_node,
            base,
            storages.bytes[storage],
        )


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


def _split_of(wait: fx.Node) -> fx.Node | None:
    """Return the node that copies the result of a bucket's gather to the buffers of its units."""
    for view in wait.users:
        for user in view.users:
            if is_bucket_split(user):
                return user
    return None


def is_bucket_split(node: fx.Node) -> bool:
    """Return whether a node copies a bucket's result to the buffers of its units."""
    return operator_name(node.target) == "aten::split_with_sizes_copy" and "out" in node.kwargs


def uses_of(base: fx.Node, storages: GraphStorages) -> list[fx.Node]:
    """Return the nodes that read or write the memory behind a node, through views of it too.

    They come in order. Views themselves do not count, and neither does the copy into a bucket's
    buffers.
    """
    (storage,) = storages.of[base]
    return [user for user in storages.users[storage] if not _only_views(user, storage, storages)]


def _only_views(user: fx.Node, storage: int, storages: GraphStorages) -> bool:
    if collective_of(user) == "wait" or is_bucket_split(user):
        return True
    return user.op == "call_function" and storages.of[user] == (storage,) and not written_by(user)


def forward_nodes(step_graph: StepGraph) -> set[fx.Node]:
    """Return the nodes that the loss is computed from."""
    _, metrics = tree.build_form(step_graph.form, step_graph.results)
    place = metrics["loss"]
    assert isinstance(place, Place), "the loss of a step is a tensor"
    output = next(iter(reversed(step_graph.graph.nodes)))
    outputs: Any = output.args[0]
    forward_set: set[fx.Node] = set()
    waiting = [outputs[place.number]]
    while waiting:
        node = waiting.pop()
        if node not in forward_set:
            forward_set.add(node)
            waiting += node.all_input_nodes
    return forward_set
