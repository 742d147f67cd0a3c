"""The passes ``gather_earlier`` and ``wait_later``."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from funcshard._utils.options import check_bytes, check_count
from funcshard.graph.effects import communicates, dependencies, is_pure, is_view
from funcshard.graph.memory import GraphStorages, Timeline, held_until, memory_of
from funcshard.graph.step_graph import (
    StepGraph,
    collective_of,
    is_unit_gather,
    starts_and_waits,
)
from funcshard.graph.traced import Traced, applied


def gather_earlier(
    traced: Traced, *, by: int | None = None, budget: int | str | None = None
) -> Traced:
    """Start gathers of units earlier, so that more of your step runs meanwhile.

    Collectives keep their order.

    Arguments:
        traced: your step, which doesn't change.
        by: how many other units a gather may overtake. By default only memory limits it.
        budget: the most bytes that the step may hold, as a number or as ``"1GiB"``; by default its
            peak (``traced.memory()``).

    Returns:
        The changed step, with the bits and the collectives of ``traced``.

    Raises:
        TypeError: ``traced`` isn't a traced step.
        ValueError: ``by`` isn't a count, or ``budget`` isn't a size.

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
        ...     traced = fs.trace(step, state, torch.ones(2, 3))
        ...     earlier = fs.passes.gather_earlier(traced, budget="1MiB")
        ...     arrows = lambda each: "".join(char for char in str(each) if char in "→←")
        ...     return arrows(traced), arrows(earlier)
        >>> before, after = fs.simulate(main, world_size=2)[0]
        >>> after.startswith("→→")
        True

    Source: the prefetching of FSDP2.
    """
    if by is not None:
        check_count("by", by, of="units")
    limit = None if budget is None else check_bytes("budget", budget, example="1GiB")
    return applied(
        traced, lambda step_graph: _gather_earlier(step_graph, by, limit), "gather_earlier"
    )


def wait_later(traced: Traced, *, budget: int | str | None = None) -> Traced:
    """Wait for collectives later: right before the first use of the result.

    Collectives keep their order. A reduction holds the data that it sends until the wait.

    Arguments:
        traced: your step, which doesn't change.
        budget: as in ``gather_earlier``.

    Returns:
        The changed step, with the bits and the collectives of ``traced``.

    Raises:
        TypeError: ``traced`` isn't a traced step.
        ValueError: ``budget`` isn't a size.

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
        ...     traced = fs.trace(step, state, torch.ones(2, 3))
        ...     later = fs.passes.wait_later(traced, budget="1MiB")
        ...     lines = [line for line in str(later).splitlines() if "reduce-scatter" in line]
        ...     return ["→" in line for line in lines]
        >>> fs.simulate(main, world_size=2)[0]
        [True, True, False, False]

    Source: the overlap of reductions with backward in DistributedDataParallel.
    """
    limit = None if budget is None else check_bytes("budget", budget, example="1GiB")
    return applied(traced, lambda step_graph: _wait_later(step_graph, limit), "wait_later")


def _timeline(step_graph: StepGraph, budget: int | None) -> tuple[Timeline, int]:
    """Return the timeline of a graph, and the most bytes that it may hold besides arguments."""
    memory = memory_of(step_graph)
    most_bytes = memory.temporary
    if budget is not None:
        # Note: the caller holds the arguments all the time, so they come off the budget.
        most_bytes = budget - memory.arguments
    return Timeline(GraphStorages.find(step_graph.graph)), most_bytes


# --- gathers --------------------------------------------------------------------------------------


def _gather_earlier(step_graph: StepGraph, by: int | None, budget: int | None) -> None:
    timeline, most_bytes = _timeline(step_graph, budget)
    needed_before = dependencies(step_graph.graph, timeline.storages)
    freed_after: dict[str, fx.Node] = {}  # by unit
    for start, (wait,) in list(starts_and_waits(step_graph.graph)):
        if is_unit_gather(start):
            unit = start.meta["event"].unit
            moved_nodes = [*_own_inputs(start), start]
            move_bounds = {before for node in moved_nodes for before in needed_before[node]}
            move_bounds -= {*moved_nodes}
            # Why: a unit that is gathered again while it is still gathered takes memory twice.
            if unit in freed_after:
                move_bounds.add(freed_after[unit])
            _move_start(timeline, most_bytes, moved_nodes, move_bounds, by)
            freed_after[unit] = timeline.last[timeline.storages.of[wait][0]]


def _move_start(
    timeline: Timeline,
    most: int,
    moved: list[fx.Node],
    bounds: Iterable[fx.Node],
    by: int | None,
) -> None:
    """Move the start of a gather, with its own inputs, to its earliest place."""
    order, position = timeline.order, timeline.position
    *_, start = moved
    moved.sort(key=position.__getitem__)
    lowest_index = max(map(position.__getitem__, bounds), default=-1)
    new_place, held_bytes, overtaken = position[start], 0, 0
    for node_index in range(position[start], lowest_index, -1):
        node = order[node_index]
        # Why not before an input: a later pass may join the gather with those of other shards.
        if node.op == "placeholder" or (communicates(node) and node is not start):
            break
        # Note: a wait stands for a unit whose computation the gather overtakes.
        overtaken += collective_of(node) == "wait" and is_unit_gather(
            node.all_input_nodes[0]
        )
        if timeline.live[node] + held_bytes > most or (by is not None and overtaken > by):
            break
        if node in moved:
            held_bytes += timeline.taken[node]
        new_place = node_index
    if new_place < position[moved[0]]:
        # Note: the inputs go along even if they alone could move no further.
        timeline.move(moved, new_place)


def _own_inputs(node: fx.Node) -> set[fx.Node]:
    """Return the pure nodes that only serve the inputs of a node."""
    own_nodes: set[fx.Node] = set()
    waiting_nodes = list(node.all_input_nodes)
    while waiting_nodes:
        input_node = waiting_nodes.pop()
        # Note: a node with several such users is met again after each of them.
        if is_pure(input_node) and input_node.users.keys() <= {node, *own_nodes}:
            own_nodes.add(input_node)
            waiting_nodes += input_node.all_input_nodes
    return own_nodes


# --- waits ----------------------------------------------------------------------------------------


def _wait_later(step_graph: StepGraph, budget: int | None) -> None:
    timeline, most_bytes = _timeline(step_graph, budget)
    # Why the last first: a wait that stays behind would stop those before it.
    for start, (wait,) in reversed(list(starts_and_waits(step_graph.graph))):
        _move_wait(timeline, most_bytes, start, wait)


def _move_wait(timeline: Timeline, most: int, start: fx.Node, wait: fx.Node) -> None:
    """Move a wait, and the views of its result, to their latest place."""
    position, storages = timeline.position, timeline.storages
    moved_nodes = [wait]
    result_uses: list[fx.Node] = []
    for node in moved_nodes:  # which grows
        for user in node.users:
            views_node = is_view(user, storages) and user.all_input_nodes == [node]
            (moved_nodes if views_node else result_uses).append(user)
    first_use = min(map(position.__getitem__, result_uses), default=position[wait])
    sent_data = storages.under(held_until(wait))
    # A copy that is sent is data too, and no result of the start.
    sent_data |= {*timeline.made[start]} - {*storages.of[start]}
    sent_data &= timeline.last.keys()  # arguments stay anyway
    new_place = position[wait] + 1
    for node_index in range(position[wait] + 1, first_use):
        node = timeline.order[node_index]
        ended_storages = [s for s in sent_data if position[timeline.last[s]] < node_index]
        # Note: data whose last use is over lives on until the wait.
        held_bytes = sum(storages.bytes[storage] for storage in ended_storages)
        if timeline.live[node] + held_bytes > most:
            break
        new_place = node_index + 1
    moved_nodes.sort(key=position.__getitem__)
    timeline.move(moved_nodes, new_place)
    for storage in sent_data:
        if position[timeline.last[storage]] < position[wait]:
            # Note: later moves have to count this data until the new place of the wait.
            timeline.set_last(storage, wait)
