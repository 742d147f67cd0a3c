"""The pass ``update_early``."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from funcshard._utils import tree
from funcshard._utils.torch_operators import (
    list_arguments,
    operator_arguments,
    operator_name,
)
from funcshard.graph.effects import communicates, dependencies, written_storages
from funcshard.graph.memory import GraphStorages
from funcshard.graph.step_graph import Place, StepGraph, starts_and_waits
from funcshard.graph.tidying import add_node, replace_node
from funcshard.graph.traced import Traced, applied


def update_early(traced: Traced) -> Traced:
    """Update each unit as soon as its gradient has arrived, which frees the gradient.

    The optimizer's operations move from the end of your step to the reductions. One that updates
    several units is split, with the same bits.

    Arguments:
        traced: your step, which doesn't change.

    Returns:
        The changed step, with the bits and the collectives of ``traced``.

    Raises:
        TypeError: ``traced`` isn't a traced step.
        ValueError: no update can move, because each needs the gradients of all units, as with
            ``max_norm`` or a ``scaler``, or a later collective.

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


def _update_early(step_graph: StepGraph) -> None:
    graph = step_graph.graph
    _split_lists(graph)
    storages = GraphStorages.find(graph)
    needed_before = dependencies(graph, storages)
    node_position = {node: node_index for node_index, node in enumerate(graph.nodes)}
    arrivals = _arrivals(graph)
    awaited_by = _awaited(needed_before, arrivals)
    update_nodes = [node for node in _updates(step_graph, storages) if awaited_by[node]]
    last_arrival = {
        node: max(awaited_by[node], key=node_position.__getitem__) for node in update_nodes
    }
    failure_reasons: list[str] = []
    moved_nodes: set[fx.Node] = set()
    last_moved: dict[fx.Node, fx.Node] = {}  # by the arrival after which it was moved
    # Why in this order: operations that several updates need move to the first of them.
    for node in sorted(
        update_nodes, key=lambda update: node_position[last_arrival[update]]
    ):
        arrival = last_arrival[node]
        needed_group: set[fx.Node] = set()
        waiting_nodes = [node]
        while waiting_nodes:
            needed_node = waiting_nodes.pop()
            is_done = needed_node in needed_group or needed_node in moved_nodes
            if not is_done and node_position[needed_node] > node_position[arrival]:
                needed_group.add(needed_node)
                waiting_nodes += needed_before[needed_node]
        # Why: ranks would issue it at another place among their collectives.
        collectives = [
            group_node for group_node in needed_group if communicates(group_node)
        ]
        unit_count = len({arrivals[wait] for wait in awaited_by[node]})
        if unit_count > 1:
            failure_reasons.append(
                f"{node.name!r}, which needs gradients of {unit_count} units"
            )
        elif collectives:
            failure_reasons.append(
                f"a collective, {collectives[0].name!r}, on which the update of "
                f"{arrivals[arrival]!r} depends"
            )
        else:
            for group_node in sorted(needed_group, key=node_position.__getitem__):
                # Note: ``append`` of fx moves a node behind this one.
                last_moved.get(arrival, arrival).append(group_node)
                last_moved[arrival] = group_node
            moved_nodes |= needed_group
    if failure_reasons and not moved_nodes:
        raise ValueError(
            "update_early moves updates that depend on the gradients of their own unit alone; "
            f"found {failure_reasons[0]}: leave out this pass, or max_norm, scaler, weighted and "
            "optimizers that communicate"
        )


def _arrivals(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the last wait for each unit's gradients, with the unit."""
    # Note: with replicas and micro-batches a buffer is reduced several times; the last one counts.
    last_wait: dict[tuple[str, str], fx.Node] = {}
    for start, (wait,) in starts_and_waits(graph):
        event: Any = start.meta.get("event")
        if event is None or event.unit is None:
            continue
        if event.kind in ("reduce_scatter", "all_reduce"):
            last_wait[event.unit, event.buffer] = wait
    return {wait: unit for (unit, _), wait in last_wait.items()}


def _awaited(
    needed: Mapping[fx.Node, Sequence[fx.Node]], arrivals: Mapping[fx.Node, str]
) -> dict[fx.Node, frozenset[fx.Node]]:
    """Return the arrivals that each node depends on."""
    awaited_by: dict[fx.Node, frozenset[fx.Node]] = {}
    for node, nodes_before in needed.items():
        wait_sets = [awaited_by[before] for before in nodes_before if awaited_by[before]]
        # Why not one union for all: most nodes have one such input, and share its set.
        joined = wait_sets[0] if len(wait_sets) == 1 else frozenset().union(*wait_sets)
        if node in arrivals:
            joined |= {node}
        awaited_by[node] = joined
    return awaited_by


def _updates(step_graph: StepGraph, storages: GraphStorages) -> list[fx.Node]:
    """Return the nodes that make the new state, or write it into the old one."""
    state, _ = tree.build_form(step_graph.form, range(len(step_graph.results)))
    state_results = step_graph.results[: len(tree.leaves(state))]
    output_nodes: Any = step_graph.graph.output_node().args[0]
    update_nodes = dict.fromkeys(
        output_nodes[r.number] for r in state_results if isinstance(r, Place)
    )
    for node in step_graph.graph.nodes:
        written_makers = {
            storages.made[storage].op for storage in written_storages(node, storages)
        }
        # Note: a fused optimizer returns nothing, and writes into the old state.
        if "placeholder" in written_makers:
            update_nodes[node] = None
    return [node for node in update_nodes if node.op == "call_function"]


# --- operations on lists --------------------------------------------------------------------------


def _split_lists(graph: fx.Graph) -> None:
    """Put an operation for each tensor in place of the optimizer's operations on lists."""
    for node in list(graph.nodes):
        # Note: such an operation computes each tensor from the same place of its other lists.
        if operator_name(node.target).startswith(("aten::_foreach_", "aten::_fused_")):
            _split_list(graph, node)


def _split_list(graph: fx.Graph, node: fx.Node) -> None:
    node_arguments = operator_arguments(node.target, node.args, node.kwargs)
    list_names = {name for name in list_arguments(node.target) if node_arguments.get(name)}
    list_lengths = {len(node_arguments[name]) for name in list_names}
    if len(list_lengths) != 1 or list_lengths == {1}:
        return
    used_parts: Any = {user.args[1] for user in node.users}  # each of which is a getitem
    # Note: in place of one kernel for all tensors there are as many kernels as tensors.
    part_results: dict[Any, fx.Node] = {}
    with graph.inserting_before(node):
        for part_index in range(*list_lengths):
            part_arguments = {
                name: [value[part_index]] if name in list_names else value
                for name, value in node_arguments.items()
            }
            part_args = [
                part_arguments.pop(name) for name in list(part_arguments)[: len(node.args)]
            ]
            part = add_node(graph, node.target, *part_args, **part_arguments)
            if part_index in used_parts:
                part_results[part_index] = add_node(graph, operator.getitem, part, 0)
    for user in list(node.users):
        replace_node(user, part_results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
