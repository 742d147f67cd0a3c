"""What a run of a graph takes: ``memory_of`` counts its bytes, ``cost_of`` its work."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import fx

from funcshard._utils import table
from funcshard._utils.table import Part, Shown, Table
from funcshard._utils.tensors import tensors_in
from funcshard._utils.torch_operators import count_flops, moved_bytes, operator_name, writes_inputs
from funcshard._utils.torch_private import storage_id
from funcshard.graph.step_graph import StepGraph, collective_of, is_unit_gather
from funcshard.graph.storages import GraphStorages
from funcshard.plan import Event


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
        attribute_names = ("arguments", "outputs", "donated", "temporary", "peak", "peak_gathered")
        rows = [
            [name.replace("_", " "), table.size(getattr(self, name))] for name in attribute_names
        ]
        return [Table(f"Memory of a step; the peak is at {self.at}", ["what", "bytes"], rows)]


def memory_of(step_graph: StepGraph) -> StepMemory:
    """Return the memory of a step, by the lives of its storages."""
    storages = GraphStorages.find(step_graph.graph)
    made_by, freed_by = storages.taken_by(), storages.freed_after()
    input_storages = {
        storage for storage, node in storages.made.items() if node.op == "placeholder"
    }
    gathered_storages = {storage for storage, node in storages.made.items() if is_unit_gather(node)}
    *nodes, output_node = step_graph.graph.nodes
    live_bytes = peak_bytes = live_gathered = peak_gathered = 0
    peak_node = "the start"
    for node in nodes:
        for storage in made_by.get(node, ()):
            live_bytes += storages.bytes[storage] * (storage not in input_storages)
            live_gathered += storages.bytes[storage] * (storage in gathered_storages)
        # Note: what a node makes and what it reads are there at once.
        if live_bytes > peak_bytes:
            peak_bytes, peak_node = live_bytes, node.name
        peak_gathered = max(peak_gathered, live_gathered)
        for storage in freed_by.get(node, ()):
            # Note: arguments count once, at the end: the caller holds them all the time.
            live_bytes -= storages.bytes[storage] * (storage not in input_storages)
            live_gathered -= storages.bytes[storage] * (storage in gathered_storages)
    returned_storages = {
        storage for node in output_node.all_input_nodes for storage in storages.of[node]
    }
    bytes_of = storages.bytes.__getitem__
    argument_bytes = sum(map(bytes_of, input_storages))
    return StepMemory(
        arguments=argument_bytes,
        outputs=sum(map(bytes_of, returned_storages)),
        donated=sum(map(bytes_of, returned_storages & input_storages)),
        temporary=peak_bytes,
        peak=argument_bytes + peak_bytes,
        peak_gathered=peak_gathered,
        at=peak_node,
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
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
            total_flops += count_flops(node.target, args, kwargs, node.meta["val"])
            total_bytes += _moved(node, args, kwargs)
    # Note: collectives of torch itself have no event, and no known ranks.
    return StepCost(total_flops, total_bytes, step_graph.events)


def _moved(node: fx.Node, args: Any, kwargs: Any) -> int:
    """Return the bytes that an operation reads and writes; 0 for a view."""
    given_storages = set(map(storage_id, tensors_in((args, kwargs))))
    result_tensors = tensors_in(node.meta["val"])
    new_tensors = [tensor for tensor in result_tensors if storage_id(tensor) not in given_storages]
    # Note: reading a tensor's value makes no memory either, and moves the value.
    reads_value = operator_name(node.target) == "aten::_local_scalar_dense"
    if not (new_tensors or reads_value or writes_inputs(node.target)):
        return 0  # a view
    return moved_bytes(node.target, args, kwargs, new_tensors)
