"""``gather_earlier`` and ``wait_later``: more time between the start and the end of collectives."""

from __future__ import annotations

from torch import fx

from funcshard._utils import check_bytes, check_count
from funcshard.graph.effects import communicates, is_pure, is_view, written_storages
from funcshard.graph.passes.applying import applied
from funcshard.graph.passes.timeline import Timeline
from funcshard.graph.step_graph import StepGraph, collective_of, starts_and_waits
from funcshard.graph.storages import held_until
from funcshard.graph.traced import Traced


def gather_earlier(
    traced: Traced, *, by: int | None = None, budget: int | str | None = None
) -> Traced:
    """Start gathers of units earlier, so that more of the step runs while data is on its way.

    All collectives stay in their order. A gather starts as early as the collective before it and
    the memory allow.

    Arguments:
        traced: the step, which does not change.
        by: how many other units a gather may overtake: it counts gathers that are waited for. By
            default the memory alone decides.
        budget: the most bytes that the step may hold at one moment, as a number or as text such as
            ``"1GiB"``; by default its own peak, see ``traced.memory()``.

    Returns:
        The changed step, with the bits and the collectives of ``traced``.

    Raises:
        TypeError: ``traced`` is no traced step.
        ValueError: ``by`` is no count, or ``budget`` no size.

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
    """Wait for collectives later: directly before the first operation that uses the result.

    All collectives stay in their order. A reduction holds the data that it sends until the wait.

    Arguments:
        traced: the step, which does not change.
        budget: the most bytes that the step may hold at one moment, as a number or as text such as
            ``"1GiB"``; by default its own peak, see ``traced.memory()``.

    Returns:
        The changed step, with the bits and the collectives of ``traced``.

    Raises:
        TypeError: ``traced`` is no traced step.
        ValueError: ``budget`` is no size.

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


# --- gathers --------------------------------------------------------------------------------------


def _gather_earlier(step_graph: StepGraph, by: int | None, budget: int | None) -> None:
    timeline = Timeline(step_graph, budget)
    # Why freed: a unit that is gathered again while it is still gathered takes memory twice.
    freed: dict[str, fx.Node] = {}
    node_before = None
    for start, (wait,) in list(starts_and_waits(step_graph.graph)):
        if _is_unit_gather(start):
            unit = start.meta["event"].unit
            bounds = [node for node in (node_before, freed.get(unit)) if node is not None]
            _move_start(timeline, start, bounds, by)
            freed[unit] = timeline.last[timeline.storages.of[wait][0]]
        node_before = start


def _is_unit_gather(node: fx.Node) -> bool:
    event = node.meta.get("event")
    return collective_of(node) == "all_gather" and event is not None and event.unit is not None


def _move_start(timeline: Timeline, start: fx.Node, before: list[fx.Node], by: int | None) -> None:
    """Move the start of a gather, with the operations that make its data, to its earliest place."""
    order, position = timeline.order, timeline.position
    group = _own_inputs(start)
    # Why after the graph's inputs: a later pass may join the gather with those of other shards.
    inputs = sum(node.op == "placeholder" for node in order)
    floor = max(map(position.__getitem__, before), default=inputs - 1)
    # Why also here: collectives of torch, as of DTensors, are no unit's.
    floor = max(
        (
            node_index
            for node_index in range(floor + 1, position[start])
            if communicates(order[node_index])
        ),
        default=floor,
    )
    for node in (*group, start):
        for input_node in node.all_input_nodes:
            if input_node not in group:
                floor = max(floor, position[input_node])
            for storage in timeline.storages.of[input_node]:
                writers = [
                    user
                    for user in timeline.storages.users[storage]
                    if position[user] < position[start]
                ]
                writes = [
                    position[user]
                    for user in writers
                    if storage in written_storages(user, timeline.storages)
                ]
                floor = max(floor, *writes, -1)
    moved = sorted((*group, start), key=position.__getitem__)
    place, held, overtaken = position[start], 0, 0
    for node_index in range(position[start], floor, -1):
        node = order[node_index]
        overtaken += collective_of(node) == "wait" and _is_unit_gather(node.all_input_nodes[0])
        if timeline.live[node] + held > timeline.limit or (by is not None and overtaken > by):
            break
        held += timeline.taken[node] if node in moved else 0
        place = node_index
    if place < position[moved[0]]:
        timeline.move(moved, place)


def _own_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that only help to compute the inputs of a node, and may run elsewhere."""
    own_nodes: list[fx.Node] = []
    waiting = list(node.all_input_nodes)
    while waiting:
        waiting_node = waiting.pop()
        if is_pure(waiting_node) and all(
            user is node or user in own_nodes for user in waiting_node.users
        ):
            own_nodes.append(waiting_node)
            waiting += waiting_node.all_input_nodes
    return own_nodes


# --- waits ----------------------------------------------------------------------------------------


def _wait_later(step_graph: StepGraph, budget: int | None) -> None:
    timeline = Timeline(step_graph, budget)
    # Why the last first: a wait that stays behind would stop those before it.
    for _, (wait,) in reversed(list(starts_and_waits(step_graph.graph))):
        _move_wait(timeline, wait)


def _move_wait(timeline: Timeline, wait: fx.Node) -> None:
    """Move a wait, and the views of its result, as late as may be."""
    position, storages = timeline.position, timeline.storages
    moved = [wait]
    uses: list[fx.Node] = []
    for node in moved:
        for user in node.users:
            views = is_view(user, storages) and user.all_input_nodes == [node]
            (moved if views else uses).append(user)
    end = min(map(position.__getitem__, uses), default=position[wait])
    (start,) = wait.all_input_nodes
    data = {
        storage
        for node in held_until(wait)
        for storage in storages.of[node]
        if storage in timeline.last
    }
    # A copy that is sent is data too.
    data |= {storage for storage in timeline.made[start] if storage not in storages.of[start]}
    place = position[wait] + 1
    for node_index in range(position[wait] + 1, end):
        node = timeline.order[node_index]
        held = sum(
            storages.bytes[storage]
            for storage in data
            if position[timeline.last[storage]] < node_index
        )
        if timeline.live[node] + held > timeline.limit:
            break
        place = node_index + 1
    moved.sort(key=position.__getitem__)
    timeline.move(moved, place)
    for storage in data:
        timeline.set_last(storage, max(timeline.last[storage], wait, key=position.__getitem__))
