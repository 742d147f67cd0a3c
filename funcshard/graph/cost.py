"""``cost_of``: the work of one step, from its graph."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import fx

from funcshard._utils import table
from funcshard._utils.table import Shown, Table
from funcshard._utils.tensors import tensors_in
from funcshard._utils.torch_operators import count_flops, moved_bytes, operator_name, writes_inputs
from funcshard._utils.torch_private import storage_id
from funcshard.graph.step_graph import StepGraph, collective_of
from funcshard.plan import Event


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """The collectives of one kind along one axis.

    Attributes:
        bytes: the sum of their sizes; see ``Event.bytes``.
        traffic: the sum of the bytes that a rank must send; see ``Event.traffic``.
    """

    axis: str
    kind: str
    count: int
    bytes: int
    traffic: int


@dataclass(frozen=True, slots=True, repr=False)
class StepCost(Shown):
    """The work of one step on this rank.

    Attributes:
        flops: FLOPs, as ``torch.utils.flop_counter`` counts them.
        bytes: bytes that the operations read and write. Caches move fewer.
    """

    flops: int
    bytes: int
    collectives: tuple[CollectiveCost, ...]

    def _parts(self) -> list[Table]:
        work_rows = [
            ["FLOPs", table.count(self.flops)],
            ["bytes read and written", table.size(self.bytes)],
        ]
        collective_rows = [
            [
                cost.axis,
                cost.kind,
                table.count(cost.count),
                table.size(cost.bytes),
                table.size(cost.traffic),
            ]
            for cost in self.collectives
        ]
        return [
            Table("Work of a step on this rank", ["what", "amount"], work_rows),
            Table(
                "Collectives of a step",
                ["axis", "kind", "number", "bytes", "sent"],
                collective_rows,
            ),
        ]


def cost_of(step_graph: StepGraph) -> StepCost:
    """Return the work of a step."""
    total_flops = total_bytes = 0
    for node in step_graph.graph.nodes:
        if operator_name(node.target) and not collective_of(node):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
            total_flops += count_flops(node.target, args, kwargs, node.meta["val"])
            total_bytes += _moved(node, args, kwargs)
    events_by_kind: dict[tuple[str, str], list[Event]] = defaultdict(list)
    # Note: collectives of torch itself have no event, and no known ranks.
    for event in step_graph.events:
        events_by_kind[event.axis, event.kind].append(event)
    collective_costs = [
        CollectiveCost(
            axis=axis,
            kind=kind,
            count=len(kind_events),
            bytes=sum(event.bytes for event in kind_events),
            traffic=sum(event.traffic for event in kind_events),
        )
        for (axis, kind), kind_events in sorted(events_by_kind.items())
    ]
    return StepCost(total_flops, total_bytes, tuple(collective_costs))


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
