"""The order that operations of a graph need: by data, by writes to shared memory, by effects.

``check_graph`` and ``check_order`` check a changed graph.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from torch import fx

from funcshard._utils.torch_operators import (
    is_random,
    operator_name,
    writes_inputs,
    written_arguments,
)
from funcshard.graph.memory import GraphStorages, held_until
from funcshard.graph.step_graph import STARTS, collective_of, starts_and_waits


def communicates(node: fx.Node) -> bool:
    """Return whether a node starts a collective, also one of torch."""
    return collective_of(node) in STARTS or operator_name(node.target).startswith(
        "_c10d_functional::"
    )


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a node that it writes to."""
    if not operator_name(node.target) or not writes_inputs(node.target):
        return []
    written_nodes: list[fx.Node] = []
    fx.node.map_arg(
        written_arguments(node.target, node.args, node.kwargs), written_nodes.append
    )
    return written_nodes


def written_storages(node: fx.Node, storages: GraphStorages) -> set[int]:
    """Return the storages that a node writes to, without its new ones."""
    return storages.under(written_by(node))


def writers_of(storage: int, storages: GraphStorages) -> list[fx.Node]:
    """Return the nodes that write to a storage, without its maker."""
    users = storages.users[storage]
    return [user for user in users if storage in written_storages(user, storages)]


def draws_numbers(node: fx.Node) -> bool:
    """Return whether a node uses or sets the random number generator."""
    if collective_of(node) in ("random_state", "set_random_state"):
        return True
    return bool(operator_name(node.target)) and is_random(
        node.target, node.args, node.kwargs
    )


def is_pure(node: fx.Node) -> bool:
    """Return whether a node only computes its result, so that it may run elsewhere."""
    # Note: a gather is no pure operation, because its place among collectives counts.
    if node.op != "call_function" or collective_of(node) or draws_numbers(node):
        return False
    return bool(operator_name(node.target)) and not written_by(node)


def is_view(node: fx.Node, storages: GraphStorages) -> bool:
    """Return whether a result is a view or a part of other memory."""
    if node.op != "call_function" or collective_of(node) or written_by(node):
        return False
    own_storages = storages.of[node]
    return bool(own_storages) and all(storages.made[s] is not node for s in own_storages)


def dependencies(graph: fx.Graph, storages: GraphStorages) -> dict[fx.Node, list[fx.Node]]:
    """Return the nodes that have to run before each node.

    The order of collectives is left out.
    """
    nodes_before = dict[fx.Node, list[fx.Node]]()
    last_writer = dict[int, fx.Node]()
    readers_of: dict[int, list[fx.Node]] = defaultdict(list)  # since the last write
    last_draw: list[fx.Node] = []
    for node in graph.nodes:
        # Note: besides its inputs, a node needs the last writes to memory that it uses, and a draw
        # the last draw of random numbers.
        needed_nodes = dict.fromkeys(node.all_input_nodes)
        used_nodes = (node, *node.all_input_nodes, *held_until(node))
        written_now = written_storages(node, storages)
        for storage in storages.under(used_nodes):
            if storage in last_writer:
                needed_nodes[last_writer[storage]] = None
            if storage in written_now:
                needed_nodes |= dict.fromkeys(readers_of.pop(storage, ()))
                last_writer[storage] = node
            # Note: a write waits for all readers of the old value, a read for the last write alone.
            elif storages.made[storage] is not node:
                readers_of[storage].append(node)
        if draws_numbers(node):
            needed_nodes |= dict.fromkeys(last_draw)
            last_draw = [node]
        # Note: an operation that writes twice to one storage would need itself.
        needed_nodes.pop(node, None)
        nodes_before[node] = list(needed_nodes)
    return nodes_before


# --- changed graphs ------------------------------------------------------------------------------


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
        for storage in graph_storages.under((start, *held_until(wait))):
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
            raise ValueError(
                f"collectives are in another order: {second} comes before {first}"
            )
    # Why of the graph before: what a pass added has no order to keep.
    needed_before = dependencies(before, GraphStorages.find(before))
    for node in kept_nodes:
        for needed_node in needed_before[node]:
            if new_position.get(needed_node.name, -1) >= new_position[node.name]:
                raise ValueError(
                    f"{node} no longer runs after {needed_node}, on whose result, memory or random "
                    "numbers it depends"
                )
