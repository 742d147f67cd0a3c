"""``check_graph``: whether a graph may run, and whether a change of it kept what order means."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from torch import fx

from funcshard.graph.effects import communicates, draws_numbers, written_storages
from funcshard.graph.step_graph import starts_and_waits
from funcshard.graph.storages import GraphStorages, held_until


def check_graph(
    graph: fx.Graph, *, before: fx.Graph | None = None, keeps_order: bool = True
) -> None:
    """Raise unless a graph may run in place of a step.

    Every node has to come after its inputs. Every collective has to be waited for exactly once, and
    used only through that wait. No node may write to the data of a collective on its way.

    With ``before``, the graph has to keep the order of these nodes of ``before`` that it still has,
    by their names: collectives, among each other; operations that draw random numbers; and each
    write, with respect to all other uses of its memory.

    Arguments:
        graph: the graph.
        before: the graph that it was made of.
        keeps_order: whether collectives have to stay in their order. A pass may change it if it
            does the same on all ranks.

    Raises:
        ValueError: it may not; the error names the nodes.
    """
    position = {node: node_index for node_index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        for input_node in node.all_input_nodes:
            if position.get(input_node, len(position)) >= position[node]:
                raise ValueError(f"{node} uses {input_node}, which does not come before it")
    for start, waits in starts_and_waits(graph):
        if len(waits) != 1:
            raise ValueError(f"{start} is waited for {len(waits)} times, not once")
        if len(start.users) != 1:
            raise ValueError(
                f"{start} is used before its wait: by {', '.join(map(str, start.users))}"
            )
    storages = GraphStorages.find(graph)
    _check_data(graph, storages, position)
    if before is not None:
        _check_order(graph, before, keeps_order)


def _check_data(graph: fx.Graph, storages: GraphStorages, position: dict[fx.Node, int]) -> None:
    writers: dict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        for storage in written_storages(node, storages):
            writers[storage].append(node)
    for start, (wait,) in starts_and_waits(graph):
        taken = {
            storage for held_node in held_until(wait) for storage in storages.of[held_node]
        } | set(storages.of[start])
        for writer in (storage_writer for storage in taken for storage_writer in writers[storage]):
            if position[start] < position[writer] < position[wait]:
                raise ValueError(
                    f"{writer} writes to memory of {start}, which has not been waited for"
                )


def _check_order(graph: fx.Graph, before: fx.Graph, keeps_order: bool) -> None:
    current_order = {node.name: node_index for node_index, node in enumerate(graph.nodes)}
    if keeps_order:
        _check_kept(
            "collectives", [node.name for node in before.nodes if communicates(node)], current_order
        )
    _check_kept(
        "operations that draw random numbers",
        [n.name for n in before.nodes if draws_numbers(n)],
        current_order,
    )
    storages = GraphStorages.find(before)
    then = {node: node_index for node_index, node in enumerate(before.nodes)}
    for node in before.nodes:
        for storage in written_storages(node, storages) if node.name in current_order else ():
            for user in storages.users[storage]:
                if user.name not in current_order or user is node:
                    continue
                if (then[user] < then[node]) != (
                    current_order[user.name] < current_order[node.name]
                ):
                    raise ValueError(
                        f"{node} writes to memory that {user} uses, and no longer runs on the same "
                        "side of it"
                    )


def _check_kept(what: str, names: list[str], now: dict[str, int]) -> None:
    kept = [name for name in names if name in now]
    for first_kept, second_kept in pairwise(kept):
        if now[first_kept] >= now[second_kept]:
            raise ValueError(
                f"{what} are in another order: {second_kept} comes before {first_kept}"
            )
