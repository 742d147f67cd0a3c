"""``Timeline``: the operations of a graph as they move, and the bytes held meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from funcshard.graph.memory import memory_of
from funcshard.graph.step_graph import StepGraph
from funcshard.graph.storages import GraphStorages


class Timeline:
    """The nodes of a graph, which ``move`` puts into another order.

    Arguments:
        step_graph: the graph; moves change it in place.
        budget: the most bytes that the step may hold; by default the peak that it has.

    Attributes:
        storages: the storages of the graph, in the order that it had.
        order: the nodes.
        position: the number of each node in ``order``.
        limit: the most bytes that may be held besides the arguments.
        made: the storages that each node makes.
        taken: their bytes.
        last: the node after which each storage is free, arguments left out.
        live: the bytes held while each node runs, besides the arguments.
    """

    def __init__(self, step_graph: StepGraph, budget: int | None) -> None:
        memory = memory_of(step_graph)
        self.storages = GraphStorages.find(step_graph.graph)
        self.order = list(step_graph.graph.nodes)
        self.position = {node: node_index for node_index, node in enumerate(self.order)}
        self.limit = memory.temporary if budget is None else budget - memory.arguments
        self.made = self.storages.taken_by()
        self.taken: dict[fx.Node, int] = defaultdict(int)
        self.last: dict[int, fx.Node] = {}
        self.live: dict[fx.Node, int] = {}
        self._freed: dict[fx.Node, int] = defaultdict(int)
        for storage, node in self.storages.made.items():
            if node.op != "placeholder":
                self.taken[node] += self.storages.bytes[storage]
                self.last[storage] = self.storages.last(storage)
                self._freed[self.last[storage]] += self.storages.bytes[storage]
        self._count(0, len(self.order))

    def move(self, nodes: Sequence[fx.Node], place: int) -> None:
        """Move nodes, in the order given, before the node that is number ``place`` now."""
        positions = [self.position[node] for node in nodes]
        first, end = (
            min(place, *positions),
            max(place, *(node_index + 1 for node_index in positions)),
        )
        apart = set(nodes)
        early = [node for node in self.order[first:place] if node not in apart]
        late = [node for node in self.order[place:end] if node not in apart]
        anchor = late[0] if late else self.order[end]
        for node in nodes:
            anchor.prepend(node)
        self.order[first:end] = [*early, *nodes, *late]
        for node_index in range(first, end):
            self.position[self.order[node_index]] = node_index
        self._count(first, end)

    def set_last(self, storage: int, node: fx.Node) -> None:
        """Note that a storage is free after another node."""
        last_before = self.last[storage]
        self._freed[last_before] -= self.storages.bytes[storage]
        self._freed[node] += self.storages.bytes[storage]
        self.last[storage] = node
        first, end = sorted((self.position[last_before], self.position[node]))
        self._count(first, end + 1)

    def _count(self, first: int, end: int) -> None:
        """Count further bytes that are held, from operation ``first`` to ``end``."""
        count_before = self.order[first - 1] if first else None
        held = 0 if count_before is None else self.live[count_before] - self._freed[count_before]
        for node in self.order[first:end]:
            held += self.taken[node]
            self.live[node] = held
            held -= self._freed[node]
