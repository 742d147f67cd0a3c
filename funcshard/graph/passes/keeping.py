"""The pass ``keep_gathered``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from torch import fx

from funcshard._utils.options import check_bytes
from funcshard.graph.effects import is_pure, writers_of
from funcshard.graph.memory import GraphStorages
from funcshard.graph.step_graph import (
    STARTS,
    StepGraph,
    collective_of,
    is_unit_gather,
    starts_and_waits,
)
from funcshard.graph.tidying import replace_node
from funcshard.graph.traced import Traced, applied


def keep_gathered(traced: Traced, *, budget: int | str) -> Traced:
    """Keep units gathered from forward to backward, where a budget of bytes allows it.

    You trade memory for gathers, also between micro-batches. Units whose gathers follow each other
    most closely come first.

    Arguments:
        traced: your step, which doesn't change.
        budget: the most bytes of kept buffers at one moment, as a number or as ``"1GiB"``.

    Returns:
        The changed step, with the bits of ``traced``.

    Raises:
        TypeError: ``traced`` isn't a traced step.
        ValueError: ``budget`` isn't a size.

    Example:
        >>> import torch, funcshard as fs
        >>> apply, params, buffers = fs.make_functional(torch.nn.Sequential(torch.nn.Linear(3, 3)))
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh, units=["0"])
        ...     sharded = fs.fully_shard(apply, plan, mesh)
        ...     loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).exp().mean()
        ...     optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
        ...     step = fs.make_train_step(loss_fn, optimizer, plan, mesh)
        ...     state = step.init(fs.shard(params, plan, mesh), buffers)
        ...     x = torch.ones(2, 3, requires_grad=True)
        ...     traced = fs.trace(step, state, x)
        ...     kept = fs.passes.keep_gathered(traced, budget="1KiB")
        ...     return [[event.kind for event in each.events] for each in (traced, kept)]
        >>> before, after = fs.simulate(main, world_size=2)[0]
        >>> before
        ['all_gather', 'all_gather', 'reduce_scatter', 'all_reduce']
        >>> after
        ['all_gather', 'reduce_scatter', 'all_reduce']

    Source: ``reshard_after_forward=False`` of FSDP2, for the units that fit.
    """
    limit = check_bytes("budget", budget, example="1GiB")
    return applied(traced, lambda step_graph: _keep(step_graph, limit), "keep_gathered")


@dataclass(frozen=True, slots=True, eq=False)
class _Gather:
    """The all-gather of a unit.

    Attributes:
        storage: the memory of the gathered buffer.
        sources: the data that this rank sends, and all nodes behind it.
    """

    start: fx.Node
    wait: fx.Node
    storage: int
    sources: set[fx.Node]

    @property
    def key(self) -> Hashable:
        """A key that's equal for two gathers with equal results."""
        event = self.start.meta["event"]
        # Why the payload too: micro-batches gather equal data, and an updated shard is other data.
        # Note: the arguments 4 and 5 are the axis and its ranks.
        return (
            event.unit,
            event.buffer,
            *self.start.args[4:6],
            _value_of(self.start.args[0]),
        )


class _Candidate(NamedTuple):
    """A gather that isn't needed if the buffer of an earlier one stays for ``moments``."""

    first: _Gather
    second: _Gather
    bytes: int
    moments: range


def _keep(step_graph: StepGraph, limit: int) -> None:
    kept_wait: dict[fx.Node, fx.Node] = {}
    for first, second, _, _ in _chosen(_candidates(step_graph.graph), limit):
        # Note: of three gathers in a row, the third reads the buffer of the first one too.
        kept_wait[second.wait] = kept_wait.get(first.wait, first.wait)
        replace_node(second.wait, kept_wait[second.wait])
        step_graph.graph.erase_node(second.wait)
        step_graph.graph.erase_node(second.start)


def _candidates(graph: fx.Graph) -> list[_Candidate]:
    """Return the gathers of data that was gathered before and isn't written."""
    storages = GraphStorages.find(graph)
    node_position = {node: node_index for node_index, node in enumerate(graph.nodes)}
    # Why by collectives, and not by operations: their number is the same on all ranks.
    collective_counts = accumulate(
        (collective_of(node) in STARTS for node in node_position), initial=0
    )
    moment = dict(zip(node_position, collective_counts, strict=False))
    kept_candidates = []
    last_gather: dict[Hashable, _Gather] = {}
    for second in _gathers(graph, storages):
        first = last_gather.get(second.key)
        last_gather[second.key] = second
        if first is None or _is_written(first, second, storages, node_position):
            continue
        # Why from the last use: until then the step holds the buffer anyway.
        last_use = storages.last(first.storage)
        held_moments = range(moment[last_use], moment[second.start] + 1)
        kept_candidates.append(
            _Candidate(first, second, storages.bytes[second.storage], held_moments)
        )
    return kept_candidates


def _gathers(graph: fx.Graph, storages: GraphStorages) -> list[_Gather]:
    unit_gathers = []
    for start, (wait,) in starts_and_waits(graph):
        # Note: with ``reshard_after_forward=n``, a gather whose data comes from another gather has
        # no sources.
        if is_unit_gather(start) and (
            source_nodes := _sources(start.all_input_nodes[0], storages)
        ):
            unit_gathers.append(_Gather(start, wait, storages.of[wait][0], source_nodes))
    return unit_gathers


def _sources(payload: fx.Node, storages: GraphStorages) -> set[fx.Node]:
    """Return the nodes behind some data, or none if more than pure operations made it."""
    source_nodes: set[fx.Node] = set()
    waiting_nodes = [payload]
    while waiting_nodes:
        node = waiting_nodes.pop()
        source_nodes.add(node)
        if node.op == "call_function":
            new_storages = [s for s in storages.of[node] if storages.made[s] is node]
            if not is_pure(node) or any(writers_of(s, storages) for s in new_storages):
                return set()
            waiting_nodes += node.all_input_nodes
    return source_nodes


def _value_of(value: Any) -> Hashable:
    """Return a value that's equal for equal computations of the same inputs."""
    if isinstance(value, fx.Node) and is_pure(value):
        return value.target, _value_of(value.args), _value_of(value.kwargs)
    if isinstance(value, Mapping):
        return _value_of(tuple(value.items()))
    if isinstance(value, tuple | list):
        return tuple(map(_value_of, value))
    hashable: Hashable = value
    return hashable


def _is_written(
    first: _Gather, second: _Gather, storages: GraphStorages, position: dict[fx.Node, int]
) -> bool:
    """Return whether a node writes to a gathered buffer, or to the shard in between."""
    if writers_of(first.storage, storages) or writers_of(second.storage, storages):
        return True
    shard_writers = [
        writer
        for storage in storages.under(second.sources)
        for writer in writers_of(storage, storages)
    ]
    between_gathers = range(position[first.start], position[second.start])
    return any(position[writer] in between_gathers for writer in shard_writers)


def _chosen(candidates: list[_Candidate], limit: int) -> list[_Candidate]:
    """Return those to keep, as long as the budget holds."""
    held_bytes: Counter[int] = Counter()
    chosen_candidates = set()
    for candidate in sorted(candidates, key=lambda candidate: len(candidate.moments)):
        if all(
            held_bytes[moment] + candidate.bytes <= limit for moment in candidate.moments
        ):
            held_bytes.update(dict.fromkeys(candidate.moments, candidate.bytes))
            # Note: gathers that follow each other closely hold memory for the shortest time.
            chosen_candidates.add(candidate)
    return [candidate for candidate in candidates if candidate in chosen_candidates]
