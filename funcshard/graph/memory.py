"""``memory_of``: the bytes that a run of a graph holds."""

from __future__ import annotations

from dataclasses import dataclass

from funcshard._utils import table
from funcshard._utils.table import Part, Shown, Table
from funcshard.graph.step_graph import StepGraph, is_unit_gather
from funcshard.graph.storages import GraphStorages


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
