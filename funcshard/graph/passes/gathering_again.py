"""``gather_again``: units are freed after forward, and gathered again for backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import fx

from funcshard._utils import did_you_mean
from funcshard.graph.editing import add_node, clone_node
from funcshard.graph.effects import written_storages
from funcshard.graph.passes.applying import applied
from funcshard.graph.passes.gathers import Gathered, forward_nodes, gathered_buffers, uses_of
from funcshard.graph.step_graph import StepGraph
from funcshard.graph.storages import GraphStorages
from funcshard.graph.traced import Traced


def gather_again(traced: Traced, *, units: Sequence[str] | None = None) -> Traced:
    """Free units after forward, and gather them again before backward uses them.

    A step of the strategy ``"shard_grad_op"`` becomes one of ``"full_shard"``. Each new gather
    starts when backward reaches the unit before. ``keep_gathered`` is the inverse.

    Arguments:
        traced: the step, which does not change.
        units: names of units; all but the root by default. Units that do not stay gathered from
            forward to backward do not change.

    Returns:
        The changed step, with the bits of ``traced``.

    Raises:
        TypeError: ``traced`` is no traced step, or ``units`` no list of names.
        ValueError: the step gathers no unit of such a name.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
        >>> apply, params, buffers = fs.make_functional(net)
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh, units=["0", "2"], strategy="shard_grad_op")
        ...     sharded = fs.fully_shard(apply, plan, mesh)
        ...     loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).exp().mean()
        ...     optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
        ...     step = fs.make_train_step(loss_fn, optimizer, plan, mesh)
        ...     state = step.init(fs.shard(params, plan, mesh), buffers)
        ...     freed = fs.passes.gather_again(fs.trace(step, state, torch.ones(2, 3)))
        ...     return [event.unit for event in freed.events if event.kind == "all_gather"]
        >>> fs.simulate(main, world_size=2)[0]
        ['0', '2', '2']

    Source: ``reshard_after_forward=True`` of FSDP2.
    """
    if units is not None and (isinstance(units, str) or not isinstance(units, Iterable)):
        raise TypeError(
            f"units must be a list of names of units; found {units!r}: write ['blocks.0', "
            "'blocks.1']"
        )
    names = None if units is None else list(units)
    return applied(traced, lambda step_graph: _gather_again(step_graph, names), "gather_again")


class _Use(NamedTuple):
    """An operation that uses a buffer of a unit.

    Attributes:
        position: its number among all operations.
        node: the operation.
        gathered: the buffer.
        forward: whether the loss is computed from it.
    """

    position: int
    node: fx.Node
    gathered: Gathered
    forward: bool


def _gather_again(step_graph: StepGraph, units: list[str] | None) -> None:
    graph = step_graph.graph
    storages = GraphStorages.find(graph)
    gathered = gathered_buffers(graph, storages)
    names = {gathered_buffer.unit for gathered_buffer in gathered}
    for unit in units or ():
        if unit not in names:
            known_units = ", ".join(map(repr, sorted(names)[:4])) or "no unit"
            hint = did_you_mean(
                str(unit),
                sorted(names),
                otherwise=f"it gathers {known_units}" + " and others" * (len(names) > 4),
            )
            raise ValueError(
                f"gather_again takes names of units that the step gathers; found {unit!r}: {hint}"
            )
    chosen = names - {""} if units is None else {*units}
    forward = forward_nodes(step_graph)
    order = list(graph.nodes)
    position = {node: node_index for node_index, node in enumerate(order)}
    uses = [
        _Use(position[node], node, gathered_buffer, node in forward)
        for gathered_buffer in gathered
        for node in uses_of(gathered_buffer.base, storages)
    ]
    uses.sort(key=lambda use: use.position)
    new: dict[Gathered, _Copies] = {}
    last: dict[Gathered, _Use] = {}
    for use_index, use in enumerate(uses):
        own_gather = use.gathered
        if own_gather.unit not in chosen or _is_written(own_gather, storages):
            continue
        if not use.forward and own_gather in last and last[own_gather].forward:
            new[own_gather] = _Copies.gather(
                own_gather, _place_ahead(uses[:use_index], use, order, forward), use.node
            )
        last[own_gather] = use
        if own_gather in new:
            new[own_gather].give(use.node, storages)


def _is_written(gathered: Gathered, storages: GraphStorages) -> bool:
    (storage,) = storages.of[gathered.base]
    return any(
        storage in written_storages(user, storages) for user in uses_of(gathered.base, storages)
    )


def _place_ahead(
    earlier: list[_Use], use: _Use, order: list[fx.Node], forward: set[fx.Node]
) -> fx.Node:
    """Return the node before which the gather for a use starts.

    It is the first operation of the unit that backward reaches before; at the begin of backward,
    the operation after the last one of forward.
    """
    place = None
    for earlier_node in reversed(earlier):
        if earlier_node.forward or (
            place is not None and earlier_node.gathered.unit != place.gathered.unit
        ):
            break
        if earlier_node.gathered.unit != use.gathered.unit:
            place = earlier_node
    if place is not None:
        return place.node
    return order[
        next(
            node_index
            for node_index in range(use.position - 1, -1, -1)
            if order[node_index] in forward
        )
        + 1
    ]


class _Copies:
    """A new gather of a buffer, and views of it that are made when they are needed."""

    def __init__(self, base: fx.Node, wait: fx.Node) -> None:
        self._graph = wait.graph
        self._copies = {base: wait}

    @classmethod
    def gather(cls, gathered: Gathered, place: fx.Node, use: fx.Node) -> _Copies:
        """Add a gather that starts before ``place``, and is waited for before ``use``."""
        graph, old = place.graph, gathered.start
        with graph.inserting_before(place):
            copies = {gathered.whole: gathered.part} if gathered.whole is not gathered.part else {}
            for node in gathered.payload_nodes():
                copies[node] = clone_node(graph, node, copies)
            label = old.args[6] if gathered.base is gathered.wait else _label(gathered)
            payload = copies.get(gathered.payload, gathered.payload)
            given_arguments = (
                payload,
                old.args[1],
                gathered.unit,
                gathered.buffer,
                *old.args[4:6],
                label,
            )
            start = add_node(graph, old.target, *given_arguments)
            start.meta["event"] = dataclasses.replace(
                old.meta["event"], unit=gathered.unit, bytes=gathered.bytes
            )
        with graph.inserting_before(use):
            return cls(gathered.base, add_node(graph, torch.ops.funcshard.wait.default, start))

    def give(self, use: fx.Node, storages: GraphStorages) -> None:
        """Let an operation read the new buffer, through the same views."""
        with self._graph.inserting_before(use):
            for input_node in use.all_input_nodes:
                if self._is_ours(input_node, storages):
                    use.replace_input_with(input_node, self._copy(input_node, storages))

    def _copy(self, node: fx.Node, storages: GraphStorages) -> fx.Node:
        if node not in self._copies:
            inputs = {
                input_node: self._copy(input_node, storages)
                for input_node in node.all_input_nodes
                if self._is_ours(input_node, storages)
            }
            self._copies[node] = clone_node(self._graph, node, inputs)
        return self._copies[node]

    def _is_ours(self, node: fx.Node, storages: GraphStorages) -> bool:
        base = next(iter(self._copies))
        return storages.of.get(node) == storages.of[base]


def _label(gathered: Gathered) -> str:
    return f"buffer {gathered.buffer!r} of unit {gathered.unit or '(root)'!r}"
