"""The sections of a graph: which part of the step an operation is, and of which unit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import fx

from funcshard.graph.step_graph import collective_of
from funcshard.graph.storages import GraphStorages


class Section(NamedTuple):
    """Operations in a row, of one part of the step and of one unit.

    Attributes:
        phase: ``"forward"``, ``"backward"`` or ``"update"``; ``"sizes"`` for the numbers at the
            start of a graph for any size; ``""`` for graphs made by hand.
        unit: the unit whose parameters they use; ``None`` before the first use of any.
        nodes: the operations in order.
    """

    phase: str
    unit: str | None
    nodes: list[fx.Node]


def sections_of(graph: fx.Graph) -> Iterator[Section]:
    """Yield the sections of a graph in order.

    A section begins where the phase changes, where a unit's gather is waited for, and where an
    operation uses parameters of another unit. Other collectives begin no section, because most of
    them serve a unit that runs later. Operations that use no parameters belong to the unit before.
    """
    owner = _owners(graph)
    found = Section("", None, [])
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        phase = node.meta.get("phase", found.phase)
        unit = owner.get(node, found.unit if phase == found.phase else None)
        if (phase, unit) != (found.phase, found.unit):
            if found.nodes:
                yield found
            found = Section(phase, unit, [])
        found.nodes.append(node)
    if found.nodes:
        yield found


def _owners(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the unit of each operation that uses parameters of one unit only.

    In the update, the reduced gradients count too.
    """
    storages = GraphStorages.find(graph)
    params: dict[int, str] = {}
    grads: dict[int, str] = {}
    for number, node in storages.made.items():
        event = node.meta.get("event")
        if event is not None and event.unit is not None:
            (params if event.kind == "all_gather" else grads)[number] = event.unit
        elif node.meta.get("unit") is not None:
            params[number] = node.meta["unit"]
    found = {}
    for node in graph.nodes:
        kind = collective_of(node)
        if kind not in ("", "wait"):
            continue
        counted = params | grads if node.meta.get("phase") == "update" else params
        read = {number for each in node.all_input_nodes for number in storages.of[each]}
        units = {counted[number] for number in read if number in counted}
        if len(units) == 1:
            (found[node],) = units
    return found
