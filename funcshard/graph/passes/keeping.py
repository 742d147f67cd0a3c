"""``keep_gathered``: units stay gathered between two uses, where a budget of bytes allows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from itertools import accumulate
from typing import NamedTuple

from torch import fx

from funcshard._utils import check_bytes
from funcshard.graph.editing import replace_node
from funcshard.graph.effects import written_storages
from funcshard.graph.passes.applying import applied
from funcshard.graph.passes.gathers import Gathered, gathered_buffers, uses_of
from funcshard.graph.step_graph import STARTS, StepGraph, collective_of
from funcshard.graph.storages import GraphStorages
from funcshard.graph.tidying import drop_unused_nodes
from funcshard.graph.traced import Traced


def keep_gathered(traced: Traced, *, budget: int | str) -> Traced:
    """Keep units gathered from forward to backward, where a budget of bytes allows it.

    The pass takes the second gather of such a unit out, and its users read the result of the first
    one. The same holds between micro-batches. Units whose gathers follow each other most closely
    come first: they hold memory for the shortest time.

    Arguments:
        traced: the step, which does not change.
        budget: the most bytes that kept buffers may hold at one moment, as a number or as text such
            as ``"1GiB"``.

    Returns:
        The changed step, with the bits of ``traced``.

    Raises:
        TypeError: ``traced`` is no traced step.
        ValueError: ``budget`` is no size.

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


class _Candidate(NamedTuple):
    """A gather that is not needed if the buffer of an earlier one stays.

    Attributes:
        first: the earlier buffer.
        second: the buffer that the gather fills.
        moments: the collectives during which the earlier buffer stays, by number.
    """

    first: Gathered
    second: Gathered
    moments: range


def _keep(step_graph: StepGraph, limit: int) -> None:
    storages = GraphStorages.find(step_graph.graph)
    kept: dict[Gathered, Gathered] = {}
    chosen = _chosen(_candidates(step_graph.graph, storages), limit)
    for first, second, _ in chosen:
        kept[second] = kept.get(first, first)
        replace_node(second.wait, kept[second].wait)
    drop_unused_nodes(step_graph.graph)
    for candidate in chosen:
        step_graph.graph.erase_node(candidate.second.wait)
        step_graph.graph.erase_node(candidate.second.start)


def _candidates(graph: fx.Graph, storages: GraphStorages) -> list[_Candidate]:
    """Return the gathers of data that was gathered before, and that no operation writes to."""
    position = {node: node_index for node_index, node in enumerate(graph.nodes)}
    # Why by collectives, and not by operations: their number is the same on all ranks.
    moment = dict(
        zip(
            position,
            accumulate((collective_of(node) in STARTS for node in position), initial=0),
            strict=False,
        )
    )
    kept_candidates = []
    last: dict[Hashable, Gathered] = {}
    for second in gathered_buffers(graph, storages):
        first = last.get(second.key)
        last[second.key] = second
        if first is None or _written(storages, position, first, second):
            continue
        uses = (first.wait, *uses_of(first.wait, storages))
        moments = range(max(map(moment.__getitem__, uses)), moment[second.start] + 1)
        kept_candidates.append(_Candidate(first, second, moments))
    return kept_candidates


def _written(
    storages: GraphStorages, position: dict[fx.Node, int], one: Gathered, other: Gathered
) -> bool:
    """Return whether a node writes to a gathered buffer, or to the shard between two gathers."""
    for gathered_buffer in (one, other):
        if any(
            storages.of[gathered_buffer.wait][0] in written_storages(user, storages)
            for user in uses_of(gathered_buffer.wait, storages)
        ):
            return True
    inputs = {
        touched_node
        for node in (other.payload, *other.payload_nodes())
        for touched_node in (node, *node.all_input_nodes)
    }
    for storage in {storage for node in inputs for storage in storages.of[node]}:
        for user in storages.users[storage]:
            between = position[one.start] < position[user] < position[other.start]
            if between and storage in written_storages(user, storages):
                return True
    return False


def _chosen(candidates: list[_Candidate], limit: int) -> list[_Candidate]:
    """Return, in order, those to keep: the shortest first, as long as the budget holds."""
    held: Counter[int] = Counter()
    chosen_candidates = []
    for candidate in sorted(candidates, key=lambda each: len(each.moments)):
        if all(held[moment] + candidate.second.bytes <= limit for moment in candidate.moments):
            held.update(dict.fromkeys(candidate.moments, candidate.second.bytes))
            chosen_candidates.append(candidate)
    return [each for each in candidates if each in chosen_candidates]
