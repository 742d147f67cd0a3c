"""``keep_gathered``: units stay gathered between two uses, where a budget of bytes allows it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from torch import fx

from funcshard._utils import check_bytes
from funcshard.graph.editing import replace_node
from funcshard.graph.effects import written_storages
from funcshard.graph.passes.applying import applied
from funcshard.graph.passes.gathers import Gathered, gathered_buffers, is_bucket_split, uses_of
from funcshard.graph.step_graph import STARTS, StepGraph, collective_of
from funcshard.graph.storages import GraphStorages
from funcshard.graph.tidying import drop_unused_nodes
from funcshard.graph.traced import Traced


def keep_gathered(traced: Traced, *, budget: int | str) -> Traced:
    """Keep units gathered from forward to backward, where a budget of bytes allows it.

    The pass takes the second gather of such a unit out, and its users read the result of the first
    one. The same holds between micro-batches. Units whose gathers follow each other most closely
    come first: they hold memory for the shortest time. ``gather_again`` is the inverse.

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
    """A gather that is not needed if the buffers of earlier ones stay.

    Attributes:
        firsts: the earlier buffers.
        seconds: the buffers that the gather fills.
        moments: the collectives during which the earlier buffers stay, by number.
    """

    firsts: list[Gathered]
    seconds: list[Gathered]
    moments: range

    @property
    def bytes(self) -> int:
        return sum(second_gather.bytes for second_gather in self.seconds)


def _keep(step_graph: StepGraph, limit: int) -> None:
    storages = GraphStorages.find(step_graph.graph)
    kept: dict[Gathered, Gathered] = {}
    chosen = _chosen(_candidates(step_graph.graph, storages), limit)
    for candidate in chosen:
        for first, second in zip(candidate.firsts, candidate.seconds, strict=True):
            kept[second] = kept.get(first, first)
            _read_instead(second, kept[second])
    drop_unused_nodes(step_graph.graph)
    for candidate in chosen:
        step_graph.graph.erase_node(candidate.seconds[0].wait)
        step_graph.graph.erase_node(candidate.seconds[0].start)


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
    collectives: dict[fx.Node, list[Gathered]] = defaultdict(list)
    for gathered_buffer in gathered_buffers(graph, storages):
        collectives[gathered_buffer.start].append(gathered_buffer)
    kept_candidates = []
    last: dict[Hashable, Gathered] = {}
    for start, seconds in collectives.items():
        firsts = [last[second_gather.key] for second_gather in seconds if second_gather.key in last]
        last |= {second_gather.key: second_gather for second_gather in seconds}
        if len(firsts) < len(seconds) or any(
            map(partial(_written, storages, position), firsts, seconds)
        ):
            continue
        uses = [user for first in firsts for user in (first.wait, *uses_of(first.base, storages))]
        kept_candidates.append(
            _Candidate(
                firsts, seconds, range(max(map(moment.__getitem__, uses)), moment[start] + 1)
            )
        )
    return kept_candidates


def _written(
    storages: GraphStorages, position: dict[fx.Node, int], one: Gathered, other: Gathered
) -> bool:
    """Return whether a node writes to a gathered buffer, or to the shard between two gathers."""
    for gathered_buffer in (one, other):
        if any(
            storages.of[gathered_buffer.base][0] in written_storages(user, storages)
            for user in uses_of(gathered_buffer.base, storages)
        ):
            return True
    inputs = {
        touched_node
        for node in (other.part, *other.payload_nodes())
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
        if all(held[moment] + candidate.bytes <= limit for moment in candidate.moments):
            held.update(dict.fromkeys(candidate.moments, candidate.bytes))
            chosen_candidates.append(candidate)
    return [each for each in candidates if each in chosen_candidates]


def _read_instead(second: Gathered, first: Gathered) -> None:
    """Let what uses the second buffer use the first one."""
    if second.base is not second.wait:  # a bucket copies into the buffer
        graph = second.base.graph
        for view in list(second.base.users):
            for user in [user for user in view.users if is_bucket_split(user)]:
                graph.erase_node(user)
    replace_node(second.base, first.base)
