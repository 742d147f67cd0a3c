"""The sections of a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import fx

from funcshard.graph.step_graph import collective_of
from funcshard.graph.storages import GraphStorages


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
