"""``cost_of``: the work of one step, from its graph: FLOPs, bytes of operations, bytes on axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from funcshard._utils import (
    Shown,
    Table,
    count_flops,
    moved_bytes,
    operator_name,
    storage_id,
    table,
    tensors_in,
    writes_inputs,
)
from funcshard.graph.step_graph import StepGraph, collective_of


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """The collectives of one kind along one axis.

    Attributes:
        axis: name of the mesh axis.
        kind: kind of the collective, as in ``Event``.
        count: number of collectives.
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
        flops: floating-point operations of products and attention, as
            ``torch.utils.flop_counter`` counts them. Recomputed operations count again.
        bytes: bytes that the operations read and write, in their tensors. A view moves none, and a
            tensor counts for each operation that reads it. The caches of a machine move fewer.
        collectives: the collectives that emit events, by axis and kind.
    """

    flops: int
    bytes: int
    collectives: tuple[CollectiveCost, ...]

    def _parts(self) -> list[Table]:
        work = [
            ["FLOPs", table.count(self.flops)],
            ["bytes read and written", table.size(self.bytes)],
        ]
        rows = [
            [
                collective.axis,
                collective.kind,
                table.count(collective.count),
                table.size(collective.bytes),
                table.size(collective.traffic),
            ]
            for collective in self.collectives
        ]
        return [
            Table("Work of a step on this rank", ["what", "amount"], work),
            Table("Collectives of a step", ["axis", "kind", "number", "bytes", "sent"], rows),
        ]


def cost_of(step_graph: StepGraph) -> StepCost:
    """Return the work of a step, from the forms of the results in its graph."""
    flops = moved = 0
    for node in step_graph.graph.nodes:
        if operator_name(node.target) and not collective_of(node):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            flops += count_flops(node.target, args, kwargs, node.meta["val"])
            moved += _moved(node, args, kwargs)
    cost_by_kind: dict[tuple[str, str], list[int]] = {}
    for event in step_graph.events:
        totals = cost_by_kind.setdefault((event.axis, event.kind), [0, 0, 0])
        for i, column_value in enumerate((1, event.bytes, event.traffic)):
            totals[i] += column_value
    return StepCost(
        flops,
        moved,
        tuple(CollectiveCost(*key, *totals) for key, totals in sorted(cost_by_kind.items())),
    )


def _moved(node: fx.Node, args: Any, kwargs: Any) -> int:
    """Return the bytes that an operation reads and writes."""
    known_storages = {storage_id(tensor) for tensor in tensors_in((args, kwargs))}
    new = [
        tensor
        for tensor in tensors_in(node.meta["val"])
        if storage_id(tensor) not in known_storages
    ]
    if (
        not new
        and not writes_inputs(node.target)
        and operator_name(node.target) != "aten::_local_scalar_dense"
    ):
        return 0  # a view
    return moved_bytes(node.target, args, kwargs, new)
