"""``bucket``: small collectives of adjacent units become one."""

from __future__ import annotations

import dataclasses
import heapq
import operator
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from funcshard._utils import check_bytes, conversion, operator_arguments
from funcshard.graph.editing import add_node, clone_node, replace_node
from funcshard.graph.effects import communicates, dependencies, written_storages
from funcshard.graph.passes.applying import applied
from funcshard.graph.passes.gathers import Gathered, forward_nodes, gathered_buffers, uses_of
from funcshard.graph.step_graph import StepGraph, starts_and_waits
from funcshard.graph.storages import GraphStorages
from funcshard.graph.traced import Traced
from funcshard.plan import Event

_ATEN: Any = torch.ops.aten
Needed = Mapping[fx.Node, Sequence[fx.Node]]  # by node, those that run before it

_WAIT: Any = torch.ops.funcshard.wait.default


def bucket(traced: Traced, *, bucket_bytes: int | str) -> Traced:
    """Let small collectives of adjacent units become one.

    The buckets are those of ``make_plan(bucket_bytes=...)``: adjacent units in forward's order,
    without the root. Units of a bucket share gathers, within forward and within backward, and they
    share reductions. A gather starts with its bucket's first unit, and a reduction with the last.
    Each number is the sum of the same numbers, so the bits stay, except on a backend that does not
    add in the order of ranks.

    Arguments:
        traced: the step, which does not change.
        bucket_bytes: the most bytes that the gathered buffers of a bucket take, as a number or as
            text such as ``"4MiB"``.

    Returns:
        The changed step.

    Raises:
        TypeError: ``traced`` is no traced step.
        ValueError: ``bucket_bytes`` is no size.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
        >>> apply, params, buffers = fs.make_functional(net)
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh, units=["0", "2"], strategy="shard_grad_op")
        ...     sharded = fs.fully_shard(apply, plan, mesh)
        ...     loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()
        ...     optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
        ...     step = fs.make_train_step(loss_fn, optimizer, plan, mesh)
        ...     state = step.init(fs.shard(params, plan, mesh), buffers)
        ...     traced = fs.trace(step, state, torch.ones(2, 3))
        ...     fewer = fs.passes.bucket(traced, bucket_bytes="1KiB")
        ...     return [(event.kind, event.unit) for event in fewer.events[:2]]
        >>> fs.simulate(main, world_size=2)[0]
        [('all_gather', '0 + 2'), ('reduce_scatter', '0 + 2')]

    Source: the buckets of DistributedDataParallel.
    """
    limit = check_bytes("bucket_bytes", bucket_bytes, example="4MiB")
    return applied(
        traced, lambda step_graph: _bucket(step_graph, limit), "bucket", keeps_order=False
    )


@dataclass(slots=True, eq=False)
class _Member:
    """A collective of one unit.

    Attributes:
        start: the node that starts it.
        wait: the node that waits for it.
        event: its event.
        gathered: the gathered buffer, for an all-gather.
    """

    start: fx.Node
    wait: fx.Node
    event: Event
    gathered: Gathered | None

    @property
    def kind(self) -> str:
        return self.event.kind

    @property
    def data(self) -> list[fx.Node]:
        """The nodes of the data that this rank sends."""
        data: Any = self.start.args[0]
        return list(data) if isinstance(data, list | tuple) else [data]

    @property
    def key(self) -> Hashable:
        """All in which the members of a bucket agree."""
        dtype: Any = (
            self.start.args[1] if self.kind == "reduce_scatter" else self.data[0].meta["val"].dtype
        )
        return (
            self.kind,
            self.event.buffer,
            self.event.dtype,
            self.event.axis,
            self.event.ranks,
            dtype,
        )


def _bucket(step_graph: StepGraph, limit: int) -> None:
    graph = step_graph.graph
    bucket_of = _assign(graph, limit)
    order = {unit: unit_index for unit_index, unit in enumerate(bucket_of)}
    # One kind after another, because a bucket of reduce-scatters brings all-reduces together.
    for collective_kind in ("all_gather", "reduce_scatter", "all_reduce"):
        storages = GraphStorages.find(graph)
        needed = dependencies(graph, storages)
        joined_groups = _find(step_graph, collective_kind, bucket_of, storages, needed)
        for members in joined_groups:
            in_order = sorted(members, key=lambda each: order[each.event.unit or ""])
            (_join_gathers if collective_kind == "all_gather" else _join_reductions)(
                members, in_order
            )
            for member in members:
                graph.erase_node(member.wait)
                graph.erase_node(member.start)
        # The users of a reduction's result have to come after those of the bucket.
        if joined_groups and collective_kind != "all_gather":
            _sort(graph, needed)


# --- which collectives ----------------------------------------------------------------------------


def _assign(graph: fx.Graph, limit: int) -> dict[str, int]:
    """Return the number of each unit's bucket, in the order in which the step gathers units.

    As in a plan, the root and units above the limit have none. A unit that is never gathered counts
    with its reduction.
    """
    buffers: dict[str, dict[str, Event]] = defaultdict(dict)
    for start, _ in starts_and_waits(graph):
        event = start.meta.get("event")
        if event is not None and event.unit and " + " not in event.unit:
            buffers[event.unit].setdefault(event.buffer, event)
    bucket_numbers: dict[str, int] = {}
    last, size, bucket_index = None, 0, 0
    for unit, events in buffers.items():
        unit_bytes = sum(event.bytes for event in events.values())
        key = {
            (event.kind, event.buffer, event.dtype, event.axis, event.ranks)
            for event in events.values()
        }
        if unit_bytes > limit:
            last = None
            continue
        if key != last or size + unit_bytes > limit:
            last, size, bucket_index = key, 0, bucket_index + 1
        size += unit_bytes
        bucket_numbers[unit] = bucket_index
    return bucket_numbers


def _find(
    step_graph: StepGraph,
    kind: str,
    bucket_of: Mapping[str, int],
    storages: GraphStorages,
    needed: Needed,
) -> list[list[_Member]]:
    """Return the collectives of a kind that become one, in the order of the step."""
    graph = step_graph.graph
    forward = forward_nodes(step_graph)
    position = {node: node_index for node_index, node in enumerate(graph.nodes)}
    gathered = {
        gather.start: gather
        for gather in gathered_buffers(graph, storages)
        if gather.base is gather.wait
    }
    member_groups: list[list[_Member]] = []
    growing: dict[Hashable, list[_Member]] = {}
    phase = False
    waits = {start: wait for start, (wait,) in starts_and_waits(graph)}
    for start in filter(communicates, graph.nodes):
        if start not in waits:  # a collective of torch, whose place among ours stays
            growing.clear()
            continue
        wait = waits[start]
        if start in gathered and phase != (
            phase := any(use in forward for use in uses_of(wait, storages))
        ):
            growing.clear()
        event = start.meta.get("event")
        if event is None or event.kind != kind or event.unit not in bucket_of:
            continue
        member = _Member(start, wait, event, gathered.get(start))
        if (kind == "all_gather" and member.gathered is None) or any(
            node.meta["val"].ndim != 1 for node in member.data
        ):
            continue
        key = bucket_of[event.unit], member.key
        growing_group = growing.get(key, [])
        apart = all(each.event.unit != event.unit for each in growing_group)
        if growing_group and apart and _may_join(growing_group, member, storages, position, needed):
            growing_group.append(member)
        else:
            growing[key] = [member]
            member_groups.append(growing[key])
    return [member_group for member_group in member_groups if len(member_group) > 1]


def _may_join(
    own: list[_Member],
    member: _Member,
    storages: GraphStorages,
    position: dict[fx.Node, int],
    needed: Needed,
) -> bool:
    """Return whether all members have their data when the bucket starts, and keep it."""
    if member.gathered is not None:
        inputs = [
            input_node
            for node in member.gathered.payload_nodes()
            for input_node in node.all_input_nodes
        ]
        return not _is_written(
            [*member.data, *inputs], own[0].start, member.start, storages, position
        )
    if any(_is_written(each.data, each.start, member.start, storages, position) for each in own):
        return False
    first, waits = position[own[0].start], {each.wait for each in own}
    seen: set[fx.Node] = set()
    waiting = list(member.data)
    while waiting:
        node = waiting.pop()
        if node in waits:
            return False
        if node not in seen and position[node] > first:
            seen.add(node)
            waiting += needed[node]
    return True


def _is_written(
    nodes: Sequence[fx.Node],
    start: fx.Node,
    end: fx.Node,
    storages: GraphStorages,
    position: dict[fx.Node, int],
) -> bool:
    """Return whether memory of nodes is written to between two others."""
    taken = {storage for node in nodes for storage in storages.of[node]}
    users = [(storage, user) for storage in taken for user in storages.users[storage]]
    return any(
        position[start] < position[user] < position[end]
        and storage in written_storages(user, storages)
        for storage, user in users
    )


# --- one collective in their place ----------------------------------------------------------------


def _join_gathers(members: list[_Member], in_order: list[_Member]) -> None:
    """Put one gather in the place of several, as ``core.buckets`` does for a plan."""
    first = members[0]
    graph = first.start.graph
    ranks = first.event.ranks
    sizes = [member.data[0].meta["val"].numel() for member in in_order]
    with graph.inserting_before(first.start):
        payloads = []
        for member in in_order:
            copies: dict[fx.Node, fx.Node] = {}
            for node in member.gathered.payload_nodes() if member.gathered is not None else ():
                copies[node] = clone_node(graph, node, copies)
            payloads.append(copies.get(member.data[0], member.data[0]))
        start = _start(first, in_order, add_node(graph, _ATEN.cat.default, payloads), True)
    with graph.inserting_before(first.wait):
        rows = add_node(graph, _ATEN.view.default, add_node(graph, _WAIT, start), [ranks, -1])
        fulls = [
            add_node(graph, _ATEN.new_empty.default, rows, [ranks * size], pin_memory=False)
            for size in sizes
        ]
        outs = [
            add_node(graph, _ATEN.view.default, full, [ranks, size])
            for full, size in zip(fulls, sizes, strict=True)
        ]
        add_node(graph, _ATEN.split_with_sizes_copy.out, rows, sizes, 1, out=outs)
    for member, full in zip(in_order, fulls, strict=True):
        replace_node(member.wait, full)


def _join_reductions(members: list[_Member], in_order: list[_Member]) -> None:
    """Put one reduction in the place of several, as ``core.buckets`` does for a plan."""
    last = members[-1]
    graph = last.start.graph
    cut = last.event.kind == "reduce_scatter"
    with graph.inserting_before(last.start):
        wholes = [_whole(member) for member in in_order]
        if cut:
            # Why by rank: each rank receives its slice of every unit, one after another.
            rows = [
                add_node(graph, _ATEN.view.default, whole_tensor, [last.event.ranks, -1])
                for whole_tensor in wholes
            ]
            joined = add_node(graph, _ATEN.cat.default, rows, 1)
            data: Any = [add_node(graph, _ATEN.view.default, joined, [-1])]
            start = _start(last, in_order, data, last.start.args[1])
        else:
            start = _start(last, in_order, add_node(graph, _ATEN.cat.default, wholes))
    with graph.inserting_before(last.wait):
        sizes = [member.wait.meta["val"].numel() for member in in_order]
        split = add_node(
            graph, _ATEN.split_with_sizes_copy.default, add_node(graph, _WAIT, start), sizes
        )
        for member_index, member in enumerate(in_order):
            replace_node(member.wait, add_node(graph, operator.getitem, split, member_index))


def _whole(member: _Member) -> fx.Node:
    """Add the data of a reduction as one tensor, in the dtype of the sum."""
    graph = member.start.graph
    whole_node = (
        member.data[0] if len(member.data) == 1 else add_node(graph, _ATEN.cat.default, member.data)
    )
    dtype = member.wait.meta["val"].dtype
    return (
        whole_node
        if whole_node.meta["val"].dtype == dtype
        else add_node(graph, conversion(), whole_node, dtype=dtype)
    )


def _start(like: _Member, in_order: list[_Member], data: Any, *more: Any) -> fx.Node:
    """Add the start of the collective of several members."""
    units = [member.event.unit or "" for member in in_order]
    label = f"buffer {like.event.buffer!r} of units {' + '.join(map(repr, units))}"
    event = dataclasses.replace(
        like.event, unit=" + ".join(units), bytes=sum(member.event.bytes for member in in_order)
    )
    start_arguments = operator_arguments(like.start.target, like.start.args, like.start.kwargs)
    where = (event.unit, event.buffer, start_arguments["axis"], start_arguments["ranks"], label)
    start = add_node(like.start.graph, like.start.target, data, *more, *where)
    start.meta["event"] = event
    return start


def _sort(graph: fx.Graph, needed: Needed) -> None:
    """Put operations after all that they need; those that may keep their place keep it."""
    order = list(graph.nodes)
    node_places = {node: place for place, node in enumerate(order)}
    missing_counts: dict[fx.Node, int] = {}
    users: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in order:
        nodes_before = {
            node_before
            for node_before in (*node.all_input_nodes, *needed.get(node, ()))
            if node_before in node_places
        }
        missing_counts[node] = len(nodes_before)
        for node_before in nodes_before:
            users[node_before].append(node)
    ready = [node_places[node] for node in order if not missing_counts[node]]
    heapq.heapify(ready)
    sorted_nodes = []
    while ready:
        node = order[heapq.heappop(ready)]
        sorted_nodes.append(node)
        for user in users[node]:
            missing_counts[user] -= 1
            if not missing_counts[user]:
                heapq.heappush(ready, node_places[user])
    assert len(sorted_nodes) == len(order), "operations of a bucket wait for each other"
    *nodes, output = sorted_nodes
    assert output.op == "output", "the output comes last"
    for node in nodes:
        output.prepend(node)
