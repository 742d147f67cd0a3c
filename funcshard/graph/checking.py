"""Check a changed graph."""

from __future__ import annotations

from itertools import pairwise

from torch import fx

from funcshard.graph.effects import communicates, dependencies, writers_of
from funcshard.graph.step_graph import starts_and_waits
from funcshard.graph.storages import GraphStorages, held_until


def check_graph(graph: fx.Graph) -> None:
    """Raise unless a graph may run in place of a step.

    Raises:
        ValueError: a node comes before its inputs, a collective isn't waited for once, or a node
            writes to the data of one on its way.
    """
    position = {node: node_index for node_index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        for input_node in node.all_input_nodes:
            # Note: an input that was erased has no position at all.
            if position.get(input_node, len(position)) >= position[node]:
                raise ValueError(f"{node} uses {input_node}, which does not come before it")
    for start, waits in starts_and_waits(graph):
        if len(waits) != 1:
            raise ValueError(f"{start} is waited for {len(waits)} times, not once")
        if len(start.users) != 1:
            user_names = ", ".join(map(str, start.users))
            raise ValueError(f"{start} is used before its wait: by {user_names}")
    # Why: a gather reads the shard until its wait; a write in between would send half of it.
    graph_storages = GraphStorages.find(graph)
    for start, (wait,) in starts_and_waits(graph):
        for storage in {s for node in (start, *held_until(wait)) for s in graph_storages.of[node]}:
            for writer in writers_of(storage, graph_storages):
                if position[start] < position[writer] < position[wait]:
                    raise ValueError(
                        f"{writer} writes to memory of {start}, which has not been waited for"
                    )


def check_order(graph: fx.Graph, before: fx.Graph) -> None:
    """Raise ``ValueError`` unless a graph keeps the order of the nodes that it has from ``before``.

    This includes collectives, operations that draw random numbers, and each write among the uses of
    its memory.
    """
    new_position = {node.name: node_index for node_index, node in enumerate(graph.nodes)}
    kept_nodes = [node for node in before.nodes if node.name in new_position]
    for first, second in pairwise(filter(communicates, kept_nodes)):
        if new_position[first.name] >= new_position[second.name]:
            raise ValueError(f"collectives are in another order: {second} comes before {first}")
    # Why of the graph before: what a pass added has no order to keep.
    needed_before = dependencies(before, GraphStorages.find(before))
    for node in kept_nodes:
        for needed_node in needed_before[node]:
            if new_position.get(needed_node.name, -1) >= new_position[node.name]:
                raise ValueError(
                    f"{node} no longer runs after {needed_node}, on whose result, memory or random "
                    "numbers it depends"
                )
