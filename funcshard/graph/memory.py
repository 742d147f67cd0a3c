"""The memory behind the tensors of a graph, and what a run takes.

``memory_of`` counts the bytes of a run, ``cost_of`` its work, and ``sections_of`` says which unit's
parameters operations use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from funcshard._utils import table
from funcshard._utils.table import Part, Shown, Table
from funcshard._utils.torch_operators import (
    count_flops,
    moved_bytes,
    new_tensors,
    operator_name,
    writes_inputs,
)
from funcshard._utils.torch_private import storage_id
from funcshard._utils.tree import tensors_in
from funcshard.graph.step_graph import (
    StepGraph,
    arguments_of,
    collective_of,
    is_unit_gather,
)
from funcshard.plan import Event


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
                result_tensors = tensors_in(node.meta.get("val"))
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
            for storage in graph_storages.under(
                (node, *node.all_input_nodes, *held_until(node))
            ):
                # Note: the maker is no user, so that a storage without users is free at once.
                if made_by[storage] is not node:
                    graph_storages.users[storage].append(node)
            if is_wait:
                graph_storages._add_sent(start, node)
        return graph_storages

    def under(self, nodes: Iterable[fx.Node]) -> set[int]:
        """Return the storages of some nodes."""
        return {storage for node in nodes for storage in self.of[node]}

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


def held_until(node: fx.Node) -> list[fx.Node]:
    """Return the data that a collective reads until a node waits for it."""
    if collective_of(node) != "wait":
        return []
    (start,) = node.all_input_nodes
    # Why one input: a group copies several parts when it starts. A reduction along one axis and a
    # broadcast replace their data, so no wait holds it.
    holds = collective_of(start) in ("all_gather", "all_to_all", "reduce_scatter")
    return start.all_input_nodes if holds and len(start.all_input_nodes) == 1 else []


# --- bytes ----------------------------------------------------------------------------------------


class Timeline:
    """The nodes of a graph in an order that ``move`` changes, and the bytes held.

    Arguments:
        counts: whether the storages that a node makes count; by default all but arguments do.

    Attributes:
        made: the storages that each node makes.
        taken: the bytes of these.
        last: the node after which each storage is free.
        live: the bytes while each node runs. What it makes and what it reads are there at once.
    """

    def __init__(
        self,
        storages: GraphStorages,
        counts: Callable[[fx.Node], bool] = lambda node: node.op != "placeholder",
    ) -> None:
        self.storages = storages
        self.order = list(storages.of)
        self.position = {node: node_index for node_index, node in enumerate(self.order)}
        self.made: dict[fx.Node, list[int]] = defaultdict(list)
        self.taken: dict[fx.Node, int] = defaultdict(int)
        self.last: dict[int, fx.Node] = {}
        self.live: dict[fx.Node, int] = {}
        self._freed: dict[fx.Node, int] = defaultdict(int)
        for storage, node in storages.made.items():
            if counts(node):
                self.made[node].append(storage)
                self.taken[node] += storages.bytes[storage]
                self.last[storage] = storages.last(storage)
                self._freed[self.last[storage]] += storages.bytes[storage]
        self._count(0, len(self.order))

    def move(self, nodes: Sequence[fx.Node], place: int) -> None:
        """Move nodes, in their given order, before the node at ``place``."""
        old_positions = [self.position[node] for node in nodes]
        first, end = min(place, *old_positions), max(place, max(old_positions) + 1)
        moved_nodes = set(nodes)
        early_nodes = [node for node in self.order[first:place] if node not in moved_nodes]
        late_nodes = [node for node in self.order[place:end] if node not in moved_nodes]
        # Note: fx has no move of several nodes; each goes before what follows them.
        anchor_node = (*late_nodes, self.order[end])[0]
        for node in nodes:
            anchor_node.prepend(node)
        self.order[first:end] = [*early_nodes, *nodes, *late_nodes]
        for node_index in range(first, end):
            self.position[self.order[node_index]] = node_index
        # Note: outside of this range the same bytes are held as before.
        self._count(first, end)

    def set_last(self, storage: int, node: fx.Node) -> None:
        last_before = self.last[storage]
        self._freed[last_before] -= self.storages.bytes[storage]
        self._freed[node] += self.storages.bytes[storage]
        self.last[storage] = node
        self._count(self.position[last_before], self.position[node] + 1)

    def _count(self, first: int, end: int) -> None:
        """Count the held bytes again, from operation ``first`` to ``end``."""
        held_bytes = 0
        if first:
            node_before = self.order[first - 1]
            held_bytes = self.live[node_before] - self._freed[node_before]
        for node in self.order[first:end]:
            held_bytes += self.taken[node]
            self.live[node] = held_bytes
            held_bytes -= self._freed[node]


@dataclass(frozen=True, slots=True, repr=False)
class StepMemory(Shown):
    """The bytes that one step holds on this rank.

    Temporaries inside kernels don't count.

    Attributes:
        arguments: state and batch.
        outputs: state and metrics.
        donated: outputs in the memory of arguments.
        temporary: the most that the step holds besides arguments.
        peak: arguments and ``temporary``.
        peak_gathered: the most that gathered units hold.
    """

    arguments: int
    outputs: int
    donated: int
    temporary: int
    peak: int
    peak_gathered: int
    at: str

    def _parts(self) -> list[Part]:
        attribute_names = (
            "arguments",
            "outputs",
            "donated",
            "temporary",
            "peak",
            "peak_gathered",
        )
        rows = [
            [name.replace("_", " "), table.size(getattr(self, name))]
            for name in attribute_names
        ]
        return [
            Table(f"Memory of a step; the peak is at {self.at}", ["what", "bytes"], rows)
        ]


def memory_of(step_graph: StepGraph) -> StepMemory:
    """Return the memory of a step, by the lives of its storages."""
    storages = GraphStorages.find(step_graph.graph)
    live_bytes = Timeline(storages).live
    peak_node = max(live_bytes, key=live_bytes.__getitem__)
    gathered_bytes = Timeline(storages, is_unit_gather).live.values()
    input_storages = {
        storage for storage, node in storages.made.items() if node.op == "placeholder"
    }
    output_node = step_graph.graph.output_node()
    returned_storages = storages.under(output_node.all_input_nodes)
    bytes_of = storages.bytes.__getitem__
    argument_bytes, temporary_bytes = (
        sum(map(bytes_of, input_storages)),
        live_bytes[peak_node],
    )
    return StepMemory(
        arguments=argument_bytes,
        outputs=sum(map(bytes_of, returned_storages)),
        donated=sum(map(bytes_of, returned_storages & input_storages)),
        temporary=temporary_bytes,
        peak=argument_bytes + temporary_bytes,
        peak_gathered=max(gathered_bytes),
        at=peak_node.name if temporary_bytes else "the start",
    )


# --- work -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class StepCost(Shown):
    """The work of one step on this rank.

    Attributes:
        flops: FLOPs, as ``torch.utils.flop_counter`` counts them.
        bytes: bytes that the operations read and write. Caches move fewer.
        events: the collectives, in order.
    """

    flops: int
    bytes: int
    events: tuple[Event, ...]

    def _parts(self) -> list[Table]:
        work_rows = [
            ["FLOPs", table.count(self.flops)],
            ["bytes read and written", table.size(self.bytes)],
        ]
        events_by_kind: dict[tuple[str, str], list[Event]] = defaultdict(list)
        for event in self.events:
            events_by_kind[event.axis, event.kind].append(event)
        collective_rows = [
            [
                axis,
                kind,
                table.count(len(events)),
                table.size(sum(event.bytes for event in events)),
                table.size(sum(event.traffic for event in events)),
            ]
            for (axis, kind), events in sorted(events_by_kind.items())
        ]
        header = ["axis", "kind", "number", "bytes", "sent"]
        return [
            Table("Work of a step on this rank", ["what", "amount"], work_rows),
            Table("Collectives of a step", header, collective_rows),
        ]


def cost_of(step_graph: StepGraph) -> StepCost:
    """Return the work of a step."""
    total_flops = total_bytes = 0
    for node in step_graph.graph.nodes:
        if operator_name(node.target) and not collective_of(node):
            args, kwargs = arguments_of(node)
            total_flops += count_flops(node.target, args, kwargs, node.meta["val"])
            new_results = new_tensors((args, kwargs), node.meta["val"])
            # Note: reading a tensor's value makes no memory either, and moves the value.
            reads_value = operator_name(node.target) == "aten::_local_scalar_dense"
            if new_results or reads_value or writes_inputs(node.target):  # no view
                total_bytes += moved_bytes(node.target, args, kwargs, new_results)
    # Note: collectives of torch itself have no event, and no known ranks.
    return StepCost(total_flops, total_bytes, step_graph.events)


# --- sections -------------------------------------------------------------------------------------


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
    unit_of_params = dict[int, str]()
    unit_of_grads = dict[int, str]()
    for storage, node in storages.made.items():
        event = node.meta.get("event")
        # Note: gathered buffers are parameters, reduced ones gradients.
        if event is not None and event.unit is not None:
            (unit_of_params if event.kind == "all_gather" else unit_of_grads)[storage] = (
                event.unit
            )
        elif node.meta.get("unit") is not None:
            unit_of_params[storage] = node.meta["unit"]
    owner_of_node = {}
    for node in graph.nodes:
        if collective_of(node) not in ("", "wait"):
            continue
        unit_of = (
            unit_of_params | unit_of_grads
            if node.meta.get("phase") == "update"
            else unit_of_params
        )
        read_storages = storages.under(node.all_input_nodes)
        units = {unit_of[storage] for storage in read_storages if storage in unit_of}
        # Note: a norm over all gradients belongs to no unit, and stays where it is.
        if len(units) == 1:
            (owner_of_node[node],) = units
    return owner_of_node
