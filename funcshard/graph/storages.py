"""The memory behind the tensors of a graph, and the sections that read it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from funcshard._utils.tensors import tensors_in
from funcshard._utils.torch_private import storage_id
from funcshard.graph.step_graph import collective_of


@dataclass(frozen=True, slots=True, eq=False)
class GraphStorages:
    """The storages of a graph.

    A wait's result lies in the memory that the start takes.

    Attributes:
        of: the storages of each node's results, as numbers.
        bytes: the size of each storage; parts that a reduction joins count as one of its start.
        users: the nodes that read, write or view each storage, in order.
    """

    of: dict[fx.Node, tuple[int, ...]]
    bytes: dict[int, int]
    made: dict[int, fx.Node]
    users: dict[int, list[fx.Node]]

    @classmethod
    def find(cls, graph: fx.Graph) -> GraphStorages:
        """Return the storages of a graph, from the tensors in ``meta["val"]``."""
        graph_storages = cls({}, {}, {}, {})
        of, made_by = graph_storages.of, graph_storages.made
        start_storage: dict[int, int] = {}  # by storage of a wait's result
        for node in graph.nodes:
            result_tensors: list[torch.Tensor] = []
            if node.op != "output":
                result_tensors = list(tensors_in(node.meta.get("val")))
            own_storages = list(map(storage_id, result_tensors))
            is_wait = collective_of(node) == "wait"
            if is_wait:
                (start,) = node.all_input_nodes
                start_storage[own_storages[0]] = of[start][0]
            # Note: views of a wait's result lie in the memory of the start too.
            own_storages = [start_storage.get(storage, storage) for storage in own_storages]
            for storage, tensor in zip(own_storages, result_tensors, strict=True):
                if storage not in made_by:
                    graph_storages._add(storage, node, tensor.untyped_storage().nbytes())
            # Note: several results may be views of one storage.
            of[node] = tuple(dict.fromkeys(own_storages))
            used_nodes = (node, *node.all_input_nodes, *held_until(node))
            for storage in {storage for used in used_nodes for storage in of[used]}:
                # Note: the maker is no user, so that a storage without users is free at once.
                if made_by[storage] is not node:
                    graph_storages.users[storage].append(node)
            if is_wait:
                graph_storages._add_sent(start, node)
        return graph_storages

    def _add(self, storage: int, node: fx.Node, size: int) -> None:
        self.made[storage], self.bytes[storage], self.users[storage] = node, size, []

    def _add_sent(self, start: fx.Node, wait: fx.Node) -> None:
        """Add the memory into which a group copies several parts that it reduces."""
        if collective_of(start) == "reduce_scatter" and len(start.all_input_nodes) > 1:
            sent_storage = -len(self.made)  # no tensor of the graph lies there
            sent_elements = sum(part.meta["val"].numel() for part in start.all_input_nodes)
            self._add(sent_storage, start, sent_elements * wait.meta["val"].itemsize)
            self.users[sent_storage].append(wait)

    def last(self, storage: int) -> fx.Node:
        """Return the last node that uses a storage, at most the graph's output."""
        return self.users[storage][-1] if self.users[storage] else self.made[storage]

    def taken_by(self) -> dict[fx.Node, list[int]]:
        return _grouped((node, storage) for storage, node in self.made.items())

    def freed_after(self) -> dict[fx.Node, list[int]]:
        return _grouped((self.last(storage), storage) for storage in self.made)


def _grouped(pairs: Iterable[tuple[fx.Node, int]]) -> dict[fx.Node, list[int]]:
    storages_of_node: dict[fx.Node, list[int]] = defaultdict(list)
    for node, storage in pairs:
        storages_of_node[node].append(storage)
    return storages_of_node


def held_until(node: fx.Node) -> list[fx.Node]:
    """Return the data that a collective reads until a node waits for it."""
    if collective_of(node) != "wait":
        return []
    (start,) = node.all_input_nodes
    # Why one input: a group copies several parts when it starts. A reduction along one axis and a
    # broadcast replace their data, so no wait holds it.
    holds = collective_of(start) in ("all_gather", "all_to_all", "reduce_scatter")
    return start.all_input_nodes if holds and len(start.all_input_nodes) == 1 else []


class Section(NamedTuple):
    """Operations in a row, of one part of the step and of one unit.

    Attributes:
        phase: ``"forward"``, ``"backward"``, ``"update"``, ``"sizes"`` for numbers at the start, or
            ``""`` in graphs made by hand.
        unit: the unit whose parameters they use; ``None`` before the first use.
    """

    phase: str
    unit: str | None
    nodes: list[fx.Node]


def sections_of(graph: fx.Graph) -> Iterator[Section]:
    """Yield the sections of a graph in order.

    A section begins where the phase changes, where a unit's gather is waited for, and where an
    operation uses parameters of another unit.
    """
    owner_of_node = _owners(graph)
    current_section = Section("", None, [])
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        # Note: other collectives begin no section, because most of them serve a unit that runs
        # later.
        phase = node.meta.get("phase", current_section.phase)
        # Why not the unit before in another phase: backward begins with the loss, which is of no
        # unit.
        unit = owner_of_node.get(
            node, current_section.unit if phase == current_section.phase else None
        )
        if (phase, unit) != current_section[:2]:
            if current_section.nodes:
                yield current_section
            current_section = Section(phase, unit, [])
        current_section.nodes.append(node)
    if current_section.nodes:
        yield current_section


def _owners(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the unit of each operation that uses parameters of one unit only."""
    storages = GraphStorages.find(graph)
    unit_of_params: dict[int, str] = {}
    unit_of_grads: dict[int, str] = {}
    for storage, node in storages.made.items():
        event = node.meta.get("event")
        # Note: gathered buffers are parameters, reduced ones gradients.
        if event is not None and event.unit is not None:
            (unit_of_params if event.kind == "all_gather" else unit_of_grads)[storage] = event.unit
        elif node.meta.get("unit") is not None:
            unit_of_params[storage] = node.meta["unit"]
    owner_of_node = {}
    for node in graph.nodes:
        if collective_of(node) not in ("", "wait"):
            continue
        unit_of = (
            unit_of_params | unit_of_grads if node.meta.get("phase") == "update" else unit_of_params
        )
        read_storages = {storage for used in node.all_input_nodes for storage in storages.of[used]}
        units = {unit_of[storage] for storage in read_storages if storage in unit_of}
        # Note: a norm over all gradients belongs to no unit, and stays where it is.
        if len(units) == 1:
            (owner_of_node[node],) = units
    return owner_of_node
