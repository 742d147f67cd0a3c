"""The order that operations of a graph need: by data, by writes to shared memory, by effects."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from funcshard._utils.torch_operators import (
    is_random,
    operator_name,
    writes_inputs,
    written_arguments,
)
from funcshard.graph.step_graph import STARTS, collective_of
from funcshard.graph.storages import GraphStorages, held_until


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
    fx.node.map_arg(written_arguments(node.target, node.args, node.kwargs), written_nodes.append)
    return written_nodes


def written_storages(node: fx.Node, storages: GraphStorages) -> set[int]:
    """Return the storages that a node writes to, without its new ones."""
    return {storage for written_node in written_by(node) for storage in storages.of[written_node]}


def writers_of(storage: int, storages: GraphStorages) -> list[fx.Node]:
    """Return the nodes that write to a storage, without its maker."""
    users = storages.users[storage]
    return [user for user in users if storage in written_storages(user, storages)]


def draws_numbers(node: fx.Node) -> bool:
    """Return whether a node uses or sets the random number generator."""
    if collective_of(node) in ("random_state", "set_random_state"):
        return True
    return bool(operator_name(node.target)) and is_random(node.target, node.args, node.kwargs)


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
    nodes_before: dict[fx.Node, list[fx.Node]] = {}
    last_writer: dict[int, fx.Node] = {}
    readers_of: dict[int, list[fx.Node]] = defaultdict(list)  # since the last write
    last_draw: list[fx.Node] = []
    for node in graph.nodes:
        # Note: besides its inputs, a node needs the last writes to memory that it uses, and a draw
        # the last draw of random numbers.
        needed_nodes = dict.fromkeys(node.all_input_nodes)
        used_nodes = (node, *node.all_input_nodes, *held_until(node))
        written_now = written_storages(node, storages)
        for storage in {storage for used in used_nodes for storage in storages.of[used]}:
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
