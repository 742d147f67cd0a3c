"""``update_early``: each unit is updated as soon as its gradient has arrived."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from funcshard._utils import list_arguments, operator_arguments, operator_name, tree
from funcshard.graph.editing import add_node, replace_node
from funcshard.graph.effects import communicates, dependencies, written_storages
from funcshard.graph.passes.applying import applied
from funcshard.graph.step_graph import Place, StepGraph, starts_and_waits
from funcshard.graph.storages import GraphStorages
from funcshard.graph.traced import Traced


def update_early(traced: Traced) -> Traced:
    """Update each unit as soon as its gradient has arrived, so that the gradient is free again.

    The operations of the optimizer move from the end of the step to the reductions. An operation
    that updates several units at once is split, with the same bits.

    Arguments:
        traced: the step, which does not change.

    Returns:
        The changed step, with the bits and the collectives of ``traced``.

    Raises:
        TypeError: ``traced`` is no traced step.
        ValueError: no update can move, because each depends on the gradients of all units, as with
            ``max_norm`` or a ``scaler``, or on a collective that comes later.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        >>> apply, params, buffers = fs.make_functional(net)
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh, units=["0", "1"])
        ...     sharded = fs.fully_shard(apply, plan, mesh)
        ...     loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()
        ...     optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
        ...     step = fs.make_train_step(loss_fn, optimizer, plan, mesh)
        ...     state = step.init(fs.shard(params, plan, mesh), buffers)
        ...     early = fs.passes.update_early(fs.trace(step, state, torch.ones(2, 3)))
        ...     text = str(early)
        ...     return text.index("= add_") < text.rindex("← reduce-scatter")
        >>> fs.simulate(main, world_size=2)[0]
        True

    Source: ``register_post_accumulate_grad_hook`` with an optimizer of each parameter.
    """
    return applied(traced, _update_early, "update_early")


Units = frozenset[str]


def _update_early(step_graph: StepGraph) -> None:
    graph = step_graph.graph
    _split_lists(graph)
    storages = GraphStorages.find(graph)
    needed = dependencies(graph, storages)
    position = {node: node_index for node_index, node in enumerate(graph.nodes)}
    arrivals = _arrivals(graph)
    awaited = _awaited(needed, arrivals)
    reasons: list[str] = []
    ends: dict[fx.Node, fx.Node] = {}  # by arrival, the last operation that was moved after it
    moved: set[fx.Node] = set()
    updates = [node for node in _updates(step_graph, storages) if awaited[node]]
    arrival = {node: max(awaited[node], key=position.__getitem__) for node in updates}
    # Why in this order: operations that several updates need move to the first of them.
    for node in sorted(updates, key=lambda each: position[arrival[each]]):
        place = arrival[node]
        group = _after(place, node, needed, position, moved)
        stop = next((group_node for group_node in group if communicates(group_node)), None)
        if len({arrivals[wait_node] for wait_node in awaited[node]}) > 1:
            reasons.append(_joint(node, needed, awaited, arrivals))
        elif stop is not None:
            reasons.append(
                f"a collective, {stop.name!r}, on which the update of {_names(arrivals[place])} "
                "depends"
            )
        else:
            for group_node in sorted(group, key=position.__getitem__):
                ends.get(place, place).append(group_node)
                ends[place] = group_node
            moved.update(group)
    if reasons and not moved:
        raise ValueError(
            "update_early moves updates that depend on the gradients of their own unit alone; "
            f"found {reasons[0]}: leave out this pass, or max_norm, scaler, weighted and "
            "optimizers that communicate"
        )


def _arrivals(graph: fx.Graph) -> dict[fx.Node, Units]:
    """Return the waits with which the gradients of units are complete, and the units of each."""
    last: dict[tuple[str, str], fx.Node] = {}
    for start, (wait,) in starts_and_waits(graph):
        event = start.meta.get("event")
        if (
            event is not None
            and event.unit is not None
            and event.kind in ("reduce_scatter", "all_reduce")
        ):
            last[event.unit, event.buffer] = wait
    units_by_node: dict[fx.Node, Units] = {}
    for (unit, _), wait in last.items():
        units_by_node[wait] = units_by_node.get(wait, frozenset()) | {unit}
    return units_by_node


def _awaited(
    needed: Mapping[fx.Node, Sequence[fx.Node]], arrivals: Mapping[fx.Node, Units]
) -> dict[fx.Node, frozenset[fx.Node]]:
    """Return, by node, the arrivals that it depends on."""
    awaited_nodes: dict[fx.Node, frozenset[fx.Node]] = {}
    for node, nodes_before in needed.items():
        own_waits = [
            awaited_nodes[node_before] for node_before in nodes_before if awaited_nodes[node_before]
        ]
        joined = own_waits[0] if len(own_waits) == 1 else frozenset().union(*own_waits)
        awaited_nodes[node] = joined | {node} if node in arrivals else joined
    return awaited_nodes


def _updates(step_graph: StepGraph, storages: GraphStorages) -> list[fx.Node]:
    """Return the nodes that make the new state, or write it into the memory of the old one."""
    state, _ = tree.build_form(step_graph.form, range(len(step_graph.results)))
    *_, output = step_graph.graph.nodes
    outputs: Any = output.args[0]
    places = step_graph.results[: len(tree.leaves(state))]
    update_nodes = {outputs[place.number]: None for place in places if isinstance(place, Place)}
    given_numbers = {
        storage_index for storage_index, node in storages.made.items() if node.op == "placeholder"
    }
    update_nodes |= {
        node: None
        for node in step_graph.graph.nodes
        if written_storages(node, storages) & given_numbers
    }
    return [node for node in update_nodes if node.op == "call_function"]


def _after(
    place: fx.Node,
    node: fx.Node,
    needed: Mapping[fx.Node, Sequence[fx.Node]],
    position: Mapping[fx.Node, int],
    moved: set[fx.Node],
) -> set[fx.Node]:
    """Return a node and all that it needs, without those before ``place`` or moved already."""
    later_nodes: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        waiting_node = waiting.pop()
        if (
            waiting_node not in later_nodes
            and waiting_node not in moved
            and position[waiting_node] > position[place]
        ):
            later_nodes.add(waiting_node)
            waiting += needed[waiting_node]
    return later_nodes


def _joint(
    node: fx.Node,
    needed: Mapping[fx.Node, Sequence[fx.Node]],
    awaited: Mapping[fx.Node, frozenset[fx.Node]],
    arrivals: Mapping[fx.Node, Units],
) -> str:
    """Return words for the first operation on which a node depends and that joins several units."""
    while larger := [
        needed_node
        for needed_node in needed[node]
        if len({arrivals[wait] for wait in awaited[needed_node]}) > 1
    ]:
        node = larger[0]
    units = frozenset().union(*(arrivals[wait_node] for wait_node in awaited[node]))
    return f"{operator_name(node.target) or node.name}, which joins gradients of {_names(units)}"


def _names(units: Iterable[str]) -> str:
    names = sorted(unit or "(root)" for unit in units)
    return ", ".join(map(repr, names[:3])) + (
        f" and {len(names) - 3} more" if len(names) > 3 else ""
    )


# --- operations on lists --------------------------------------------------------------------------


def _split_lists(graph: fx.Graph) -> None:
    """Put an operation for each tensor in the place of the optimizers' operations on lists.

    Such an operation computes each tensor from tensors and numbers at the same place of its other
    lists.
    """
    for node in list(graph.nodes):
        if operator_name(node.target).startswith(("aten::_foreach_", "aten::_fused_")):
            _split_list(graph, node)


def _split_list(graph: fx.Graph, node: fx.Node) -> None:
    given = operator_arguments(node.target, node.args, node.kwargs)
    names = [name for name in list_arguments(node.target) if given.get(name)]
    count = len(given[names[0]]) if names else 0
    if count < 2 or any(len(given[name]) != count for name in names):
        return
    results: dict[int, fx.Node] = {}
    with graph.inserting_before(node):
        for part_index in range(count):
            own_arguments = {
                name: [value[part_index]] if name in names else value
                for name, value in given.items()
            }
            args = [own_arguments.pop(name) for name in list(own_arguments)[: len(node.args)]]
            part = add_node(graph, node.target, *args, **own_arguments)
            if any(
                user.target is operator.getitem and user.args[1] == part_index
                for user in node.users
            ):
                results[part_index] = add_node(graph, operator.getitem, part, 0)
    for user in list(node.users):
        place: Any = user.args[1]
        replace_node(user, results[place])
        graph.erase_node(user)
    graph.erase_node(node)
