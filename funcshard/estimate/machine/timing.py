"""The seconds of collectives, computations, updates and copies."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

from funcshard._utils.options import check_choice, check_count
from funcshard.estimate.machine.hardware import ALL_KINDS, Hardware, Link, weakest

KINDS = ("all_gather", "reduce_scatter", "all_reduce")


class Timed(NamedTuple):
    """Seconds, and how far you can trust them: ``source`` is one of ``SOURCES``."""

    seconds: float
    source: str


def collective_time(
    hardware: Hardware, event_kind: str, nbytes: int, ranks: int, *, stride: int = 1
) -> Timed:
    """Return the time of one collective along a mesh axis.

    It's that of the node's links, or across nodes of the network's. Between two links it's
    interpolated. Beyond the last one, the latency continues its line and the bandwidth stays.

    Arguments:
        hardware: the machine.
        event_kind: one of ``"all_gather"``, ``"reduce_scatter"`` and ``"all_reduce"``.
        nbytes: size of the whole buffer, as in ``fs.Event``.
        ranks: number of ranks on the axis.
        stride: distance in global rank between neighbours on the axis: the product of the sizes of
            all later mesh axes.

    Raises:
        TypeError: a number isn't a whole number.
        ValueError: a number is too small, or the kind is unknown.

    Example:
        >>> from funcshard.estimate import collective_time, load_hardware
        >>> h100 = load_hardware("h100-8x400gbps")
        >>> time = collective_time(h100, "all_gather", 394_000_000, 8)
        >>> f"{1e3 * time.seconds:.2f} ms, {time.source}"
        '1.03 ms, calibrated'
        >>> collective_time(h100, "all_gather", 394_000_000, 16384).source
        'extrapolated'

    Source: an all-reduce is a reduce-scatter and an all-gather, as in NCCL's rings.
    """
    check_choice("event_kind", event_kind, KINDS)
    nbytes, ranks = (
        check_count("nbytes", nbytes, 0, of="bytes"),
        check_count("ranks", ranks),
    )
    stride = check_count("stride", stride)
    if ranks == 1:
        return Timed(0.0, "exact")
    # How many nodes the axis through rank 0 reaches.
    node_count = min(ranks, (ranks - 1) * stride // hardware.ranks_per_node + 1)
    if not hardware.network:
        node_count = 1  # a measured machine, such as a laptop
    axis_links = hardware.network if node_count > 1 else hardware.node
    kind_links = _of_kind(axis_links, event_kind)
    # Note: without a measured all-reduce, it is the two halves of NCCL's ring.
    if event_kind == "all_reduce" and not kind_links:
        scatter_time = collective_time(
            hardware, "reduce_scatter", nbytes, ranks, stride=stride
        )
        gather_time = collective_time(hardware, "all_gather", nbytes, ranks, stride=stride)
        return Timed(
            scatter_time.seconds + gather_time.seconds,
            weakest(scatter_time.source, gather_time.source),
        )
    if node_count > 1:
        return _across_nodes(hardware, event_kind, nbytes, ranks, node_count)
    latency, bandwidth, how = _at(kind_links or _node_links(hardware, event_kind), ranks)
    return Timed(latency + nbytes / bandwidth, how)


def compute_time(
    hardware: Hardware, flops: int, nbytes: int, dtype: str, *, kernels: int = 0
) -> Timed:
    """Return the time of a computation on one rank.

    It's the larger of ``flops / (peak · flops_efficiency)`` and ``nbytes / (memory_bandwidth ·
    memory_efficiency)``, plus the kernels' overhead.

    Arguments:
        flops: floating-point operations; a product and a sum count as two.
        nbytes: bytes that the kernels read and write in device memory.

    Raises:
        ValueError: the description has no peak for the dtype.
    """
    flop_seconds = 0.0
    if flops:
        if dtype not in hardware.flops:
            raise ValueError(
                f"dtype must be one that {hardware.name!r} has a peak for, "
                f"{', '.join(hardware.flops)}; found {dtype!r}: add its FLOP/s to a copy of the "
                "description"
            )
        flop_seconds = flops / (hardware.flops[dtype] * hardware.flops_efficiency)
    memory_seconds = nbytes / (hardware.memory_bandwidth * hardware.memory_efficiency)
    figures = ["memory_bandwidth", "memory_efficiency"]
    if flop_seconds > memory_seconds:
        figures = [f"flops.{dtype}", "flops_efficiency"]
    busy_seconds, overhead = (
        max(flop_seconds, memory_seconds),
        kernels * hardware.kernel_overhead,
    )
    # Note: the longest of the three times gives the source.
    if overhead > busy_seconds:
        figures = ["kernel_overhead"]
    how = [hardware.sources[name].how for name in figures if busy_seconds or overhead]
    return Timed(busy_seconds + overhead, weakest(*how))


def update_time(hardware: Hardware, nbytes: int) -> Timed:
    """Return the time in which the optimizer reads and writes bytes of device memory."""
    if not nbytes:
        return Timed(0.0, "exact")
    efficiency_name, efficiency = "optimizer_efficiency", hardware.optimizer_efficiency
    if efficiency is None:
        efficiency_name, efficiency = "memory_efficiency", hardware.memory_efficiency
    how = [hardware.sources[name].how for name in ("memory_bandwidth", efficiency_name)]
    return Timed(nbytes / (hardware.memory_bandwidth * efficiency), weakest(*how))


def offload_time(hardware: Hardware, nbytes: int) -> Timed:
    """Return the time of one copy between device and host, in either direction."""
    if not nbytes:
        return Timed(0.0, "exact")
    link = hardware.offload
    return Timed(link.latency + nbytes / link.bandwidth, link.source.how)


def _of_kind(links: Sequence[Link], kind: str) -> list[Link]:
    return sorted((link for link in links if link.kind == kind), key=lambda each: each.size)


def _shared(links: Sequence[Link]) -> list[Link]:
    """Return the links of all kinds, or else those of all-gathers."""
    return _of_kind(links, ALL_KINDS) or _of_kind(links, "all_gather")


def _node_links(hardware: Hardware, kind: str) -> list[Link]:
    links = _shared(hardware.node)
    if not links:
        raise ValueError(
            f"hardware must have links for {kind!r}, for 'all_gather' or for 'any' kind inside a "
            f"node; {hardware.name!r} has none: add one to its 'node'"
        )
    return links


def _across_nodes(
    hardware: Hardware, kind: str, nbytes: int, ranks: int, nodes: int
) -> Timed:
    ranks_per_node = hardware.ranks_per_node
    links = _of_kind(hardware.network, kind) or _shared(hardware.network)
    latency, bandwidth, how = _at(links, nodes)
    # Note: the axis's groups communicate side by side at once, and share the cards of a node.
    rank_share = ranks / nodes / ranks_per_node  # of the node's cards
    # Why: the links are those of a ring through all ranks of each node. A ring through fewer ranks
    # has fewer steps there.
    if ranks_per_node > 1:
        in_node, _, node_how = _at(_node_links(hardware, kind), ranks_per_node)
        node_steps = nodes * ranks_per_node * (1 - rank_share)
        latency = max(
            latency - node_steps * in_node / (ranks_per_node - 1), latency * rank_share
        )
        how = weakest(how, node_how)
    ring_ranks = ranks_per_node * nodes
    # Note: bytes per second on the wire, through all cards of a node.
    wire_bandwidth = bandwidth * (ring_ranks - 1) / ring_ranks
    factor, factor_how = _size_factor(hardware, nbytes // ranks)
    sent_bytes = nbytes * (ranks - 1) / ranks
    seconds = latency + sent_bytes / (wire_bandwidth * rank_share * factor)
    return Timed(seconds, weakest(how, factor_how))


def _at(links: Sequence[Link], size: int) -> tuple[float, float, str]:
    """Return latency, bandwidth and source for a number of ranks or nodes."""
    link_index = bisect.bisect_left([link.size for link in links], size)
    link = links[min(link_index, len(links) - 1)]
    if link.size == size:
        return link.latency, link.bandwidth, link.source.how
    # Note: fewer ranks than were ever measured: the smallest link is the nearest.
    if link_index == 0:
        return link.latency, link.bandwidth, "extrapolated"
    smaller_link = links[link_index - 1]
    if link_index == len(links):
        # Note: a ring of one rank takes no time, so one link alone gives a line too.
        base_size, base_latency = 1, 0.0
        if link_index > 1:
            base_size, base_latency = links[-2].size, links[-2].latency
        latency_slope = 0.0
        if link.size > base_size:
            latency_slope = (link.latency - base_latency) / (link.size - base_size)
        latency = link.latency + max(latency_slope, 0.0) * (size - link.size)
        return latency, link.bandwidth, "extrapolated"
    linear_part = (size - smaller_link.size) / (link.size - smaller_link.size)
    # Note: links are measured at powers of two, and the bandwidth changes with each doubling.
    log_part = math.log(size / smaller_link.size) / math.log(link.size / smaller_link.size)
    latency = smaller_link.latency + linear_part * (link.latency - smaller_link.latency)
    bandwidth = smaller_link.bandwidth + log_part * (
        link.bandwidth - smaller_link.bandwidth
    )
    return latency, bandwidth, weakest(smaller_link.source.how, link.source.how)


def _size_factor(hardware: Hardware, nbytes: int) -> tuple[float, str]:
    """Return the share of the network's bandwidth for messages of a size, with its source."""
    factors = hardware.size_factors
    if not factors:
        return 1.0, "exact"
    factor_index = bisect.bisect_right(
        [size_factor.bytes for size_factor in factors], nbytes
    )
    if factor_index in (0, len(factors)):
        nearest_factor = factors[max(factor_index - 1, 0)]
        return nearest_factor.factor, nearest_factor.source.how
    smaller_factor, larger_factor = factors[factor_index - 1 : factor_index + 1]
    log_part = math.log(nbytes / smaller_factor.bytes) / math.log(
        larger_factor.bytes / smaller_factor.bytes
    )
    factor = smaller_factor.factor + log_part * (
        larger_factor.factor - smaller_factor.factor
    )
    return factor, weakest(smaller_factor.source.how, larger_factor.source.how)
