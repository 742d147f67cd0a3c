"""``memory_of``: the bytes that a run of a graph holds, from the lives of its storages."""

from __future__ import annotations

from dataclasses import dataclass

from funcshard._utils import Part, Shown, Table, table
from funcshard.graph.step_graph import StepGraph, collective_of
from funcshard.graph.storages import GraphStorages


@dataclass(frozen=True, slots=True, repr=False)
class StepMemory(Shown):
    """The bytes that one step holds on this rank.

    The kernels' own temporaries are not counted. A tensor counts from the operation that makes it
    until its last use. The copy of several parts that a reduction sends counts until its wait.

    Attributes:
        arguments: state and batch.
        outputs: state and metrics.
        donated: the part of the outputs that lies in the memory of the arguments.
        temporary: the most that the step holds besides arguments, at one moment.
        peak: the most that it holds at one moment: the arguments and ``temporary``.
        peak_gathered: the most that gathered units hold at one moment.
        at: the operation that reaches the peak.
    """

    arguments: int
    outputs: int
    donated: int
    temporary: int
    peak: int
    peak_gathered: int
    at: str

    def _parts(self) -> list[Part]:
        rows = [
            ["arguments", table.size(self.arguments)],
            ["outputs", table.size(self.outputs)],
            ["donated", table.size(self.donated)],
            ["temporary", table.size(self.temporary)],
            ["peak", table.size(self.peak)],
            ["peak gathered", table.size(self.peak_gathered)],
        ]
        return [Table(f"Memory of a step; the peak is at {self.at}", ["what", "bytes"], rows)]


def memory_of(step_graph: StepGraph) -> StepMemory:
    """Return the memory of a step, by the lives of the graph's storages."""
    storages = GraphStorages.find(step_graph.graph)
    taken, freed = storages.taken_by(), storages.freed_after()
    given_numbers = {
        storage_index for storage_index, node in storages.made.items() if node.op == "placeholder"
    }
    gathered = {
        storage_index
        for storage_index, node in storages.made.items()
        if collective_of(node) == "all_gather"
        and (event := node.meta.get("event")) is not None
        and event.unit is not None
    }
    live = peak = live_gathered = peak_gathered = 0
    at = "the start"
    returned: set[int] = set()
    for node in step_graph.graph.nodes:
        if node.op == "output":
            returned = {
                storage_index
                for input_node in node.all_input_nodes
                for storage_index in storages.of.get(input_node, ())
            }
            break
        freed_numbers = [
            storage_index
            for storage_index in taken.get(node, ())
            if storage_index not in given_numbers
        ]
        live += sum(storages.bytes[storage_index] for storage_index in freed_numbers)
        live_gathered += sum(
            storages.bytes[storage_index]
            for storage_index in freed_numbers
            if storage_index in gathered
        )
        if live > peak:
            peak, at = live, node.name
        peak_gathered = max(peak_gathered, live_gathered)
        for storage_index in freed.get(node, ()):
            if storage_index not in given_numbers:
                live -= storages.bytes[storage_index]
                live_gathered -= storages.bytes[storage_index] if storage_index in gathered else 0
    arguments = sum(storages.bytes[storage_index] for storage_index in given_numbers)
    return StepMemory(
        arguments=arguments,
        outputs=sum(storages.bytes[storage_index] for storage_index in returned),
        donated=sum(storages.bytes[storage_index] for storage_index in returned & given_numbers),
        temporary=peak,
        peak=arguments + peak,
        peak_gathered=peak_gathered,
        at=at,
    )
