"""The memory behind the tensors of a graph: which nodes share it, and when it comes and goes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import fx

from funcshard._utils import storage_id, tree
from funcshard.graph.step_graph import collective_of


@dataclass(frozen=True, slots=True, eq=False)
class GraphStorages:
    """The storages of a graph.

    The result of a wait lies in the memory that the start of its collective takes. The wait uses
    the data of a collective that reads it until then.

    Attributes:
        of: the storages of each node's results, as numbers.
        bytes: the size of each storage. A copy of several parts, which a reduction sends, counts as
            a storage of its start, but is no result of it.
        made: the node that makes each storage.
        users: the nodes that read, write or view each storage, in order, without its maker.
    """

    of: dict[fx.Node, tuple[int, ...]]
    bytes: dict[int, int]
    made: dict[int, fx.Node]
    users: dict[int, list[fx.Node]]

    @classmethod
    def find(cls, graph: fx.Graph) -> GraphStorages:
        """Return the storages of a graph, from the tensors in ``meta["val"]``."""
        graph_storages = cls({}, {}, {}, {})
        waited: dict[int, int] = {}  # storage of a wait's result -> that of its start's
        for node in graph.nodes:
            if node.op == "output":
                own_numbers: list[int] = []
            else:
                value = node.meta.get("val")
                leaves = [value] if isinstance(value, torch.Tensor) else tree.leaves(value)
                tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
                numbers = map(storage_id, tensors)
                own_numbers = [
                    waited.get(storage_index, storage_index) for storage_index in numbers
                ]
                if collective_of(node) == "wait":
                    (start,) = node.all_input_nodes
                    waited[own_numbers[0]] = graph_storages.of[start][0]
                    own_numbers = [*graph_storages.of[start]]
                for storage, tensor in zip(own_numbers, tensors, strict=True):
                    if storage not in graph_storages.made:
                        graph_storages.made[storage] = node
                        graph_storages.bytes[storage] = tensor.untyped_storage().nbytes()
                        graph_storages.users[storage] = []
            graph_storages.of[node] = tuple(dict.fromkeys(own_numbers))
            touched = {
                storage
                for touched_node in (node, *node.all_input_nodes, *held_until(node))
                for storage in graph_storages.of[touched_node]
            }
            for storage in touched:
                if graph_storages.made[storage] is not node:
                    graph_storages.users[storage].append(node)
            if collective_of(node) == "wait":
                graph_storages._add_sent(node.all_input_nodes[0], node)
        return graph_storages

    def _add_sent(self, start: fx.Node, wait: fx.Node) -> None:
        """Add the memory into which a group copies several parts that it reduces."""
        if collective_of(start) == "reduce_scatter" and len(start.all_input_nodes) > 1:
            sent_index = -len(self.made)  # no tensor of the graph lies there
            size = (
                sum(part.meta["val"].numel() for part in start.all_input_nodes)
                * wait.meta["val"].itemsize
            )
            self.made[sent_index], self.bytes[sent_index], self.users[sent_index] = (
                start,
                size,
                [wait],
            )

    def last(self, storage: int) -> fx.Node:
        """Return the last node that uses a storage; the graph's output, if it returns it."""
        return self.users[storage][-1] if self.users[storage] else self.made[storage]

    def taken_by(self) -> dict[fx.Node, list[int]]:
        """Return the storages that each node makes."""
        taken_numbers: dict[fx.Node, list[int]] = defaultdict(list)
        for storage, node in self.made.items():
            taken_numbers[node].append(storage)
        return taken_numbers

    def freed_after(self) -> dict[fx.Node, list[int]]:
        """Return the storages that are free after each node."""
        freed_numbers: dict[fx.Node, list[int]] = defaultdict(list)
        for storage in self.made:
            freed_numbers[self.last(storage)].append(storage)
        return freed_numbers


def held_until(node: fx.Node) -> list[fx.Node]:
    """Return the data that a collective reads until a node waits for it."""
    if collective_of(node) != "wait":
        return []
    (start,) = node.all_input_nodes
    # Why: a group copies several parts when it starts, and a reduction along one axis replaces its
    # data.
    reads = (
        collective_of(start) in ("all_gather", "all_to_all", "reduce_scatter")
        and len(start.all_input_nodes) == 1
    )
    return start.all_input_nodes if reads else []
