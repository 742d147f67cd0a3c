from __future__ import annotations

import itertools

import pytest

from funcshard.estimate import collective_time, hardware_names, load_hardware
from funcshard.estimate.machine import compute_time, offload_time
from funcshard.estimate.machine.timing import KINDS, Timed

H100 = load_hardware("h100-8x400gbps")
LARGE = 1 << 40  # bytes: the latency is negligible, and so is the step below the full size factor

# funcshard issue 20: ranks, µs and GB/s inside a node; nodes, µs and GB/s across nodes
IN_NODE = [(2, 8, 537), (4, 17, 434), (8, 30, 394)]
ACROSS = [(2, 70, 410), (4, 146, 396), (8, 297, 390), (16, 599, 387), (32, 1204, 386)]


def seconds(kind, nbytes, ranks, **options):
    return collective_time(H100, kind, nbytes, ranks, **options).seconds


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
class TestFiguresOfTheIssue:
    @pytest.mark.parametrize(("ranks", "micros", "gb"), IN_NODE)
    def test_inside_a_node(self, kind, ranks, micros, gb):
        assert seconds(kind, 0, ranks) == pytest.approx(micros * 1e-6, rel=1e-12)
        assert seconds(kind, gb * 10**6, ranks) == pytest.approx(micros * 1e-6 + 1e-3, rel=1e-12)
        assert collective_time(H100, kind, 10**9, ranks).source == "calibrated"

    @pytest.mark.parametrize(("nodes", "micros", "gb"), ACROSS)
    @pytest.mark.parametrize(("mb_a_rank", "factor"), [(1, 0.68), (7.9, 0.68), (32, 0.87), (500, 0.87)])
    def test_across_nodes(self, kind, nodes, micros, gb, mb_a_rank, factor):
        nbytes = int(mb_a_rank * 1e6) * 8 * nodes
        expected = micros * 1e-6 + nbytes / (gb * 1e9 * factor)
        assert seconds(kind, nbytes, 8 * nodes) == pytest.approx(expected, rel=1e-12)
        assert collective_time(H100, kind, nbytes, 8 * nodes).source == "calibrated"


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    for ranks in (8, 64):
        assert seconds("all_reduce", 10**9, ranks) == 2 * seconds("all_gather", 10**9, ranks)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_kind_with_links_of_its_own_takes_their_time(kind):
    cpu = load_hardware("cpu-2x-gloo")
    link = next(each for each in cpu.node if (each.kind, each.size) == (kind, 2))
    assert len({each.bandwidth for each in cpu.node}) > 2
    expected = link.latency + 10**8 / link.bandwidth
    assert collective_time(cpu, kind, 10**8, 2).seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_takes_no_time(kind):
    assert collective_time(H100, kind, 10**9, 1) == Timed(0.0, "exact")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "stride"), [(2, 1), (8, 1), (16, 1), (2, 8), (4, 4), (300, 1), (512, 3)])
def test_more_bytes_take_longer(kind, ranks, stride):
    times = [seconds(kind, round(1.5**k), ranks, stride=stride) for k in range(10, 60)]
    assert all(a < b for a, b in itertools.pairwise(times))


def test_factors_between_two_sizes_are_interpolated_in_the_logarithm():
    nbytes = 16 * 10**6 * 16  # 16 MB a rank lies halfway between 8 and 32
    assert seconds("all_gather", nbytes, 16) == pytest.approx(70e-6 + nbytes / (410e9 * (0.68 + 0.87) / 2), rel=1e-12)


def test_ranks_and_nodes_between_two_links_are_interpolated():
    assert 17e-6 < seconds("all_gather", 0, 6) < 30e-6
    assert seconds("all_gather", 0, 24 * 8) == pytest.approx((599 + 1204) / 2 * 1e-6, rel=1e-12)
    assert seconds("all_gather", LARGE, 16) < seconds("all_gather", LARGE, 24) < seconds("all_gather", LARGE, 32)


@pytest.mark.parametrize(("ranks", "source"), [(256, "calibrated"), (257, "extrapolated"), (16384, "extrapolated")])
def test_beyond_32_nodes_is_extrapolated(ranks, source):
    assert collective_time(H100, "all_gather", 10**9, ranks).source == source


def test_latency_grows_in_a_line_beyond_32_nodes():
    each = (1204e-6 - 599e-6) / 16  # seconds a node
    assert seconds("all_gather", 0, 64 * 8) == pytest.approx(1204e-6 + 32 * each, rel=1e-9)


class TestPartsOfANode:
    """Axes with fewer than all ranks of each node share the node's network cards."""

    @pytest.mark.parametrize("ranks_a_node", [1, 2, 4, 8])
    def test_l_of_8_ranks_have_l_eighths_of_the_wire(self, ranks_a_node):
        ranks = 4 * ranks_a_node
        wire = 396e9 * 31 / 32 * 0.87  # bytes a second that leave a node, when all 32 ranks gather
        expected = LARGE * (ranks - 1) / ranks / (wire * ranks_a_node / 8)
        found = seconds("all_gather", LARGE, ranks, stride=8 // ranks_a_node)
        assert found == pytest.approx(expected, rel=1e-3)

    @pytest.mark.parametrize("nodes", [2, 4, 8, 16, 32])
    def test_fewer_ranks_a_node_have_a_shorter_latency(self, nodes):
        times = [seconds("all_gather", 0, nodes * each, stride=8 // each) for each in (1, 2, 4, 8)]
        assert times == sorted(times)
        assert times[0] >= times[-1] / 8

    @pytest.mark.parametrize(("ranks", "stride", "same"), [(2, 4, (2, 1)), *((4, stride, (4, 8)) for stride in (16, 64))])
    def test_a_stride_inside_a_node_stays_there_and_one_of_whole_nodes_has_one_rank_in_each(self, ranks, stride, same):
        assert seconds("all_gather", 10**9, ranks, stride=stride) == seconds("all_gather", 10**9, same[0], stride=same[1])


@pytest.mark.parametrize("name", hardware_names())
def test_every_shipped_machine_times_everything(name):
    hardware = load_hardware(name)
    for kind, ranks in itertools.product(KINDS, (2, 3, 8, 64)):
        assert 0 < collective_time(hardware, kind, 10**7, ranks).seconds < 10
    for dtype in hardware.flops:
        assert 0 < compute_time(hardware, 10**9, 10**6, dtype, kernels=3).seconds < 60
    assert offload_time(hardware, 10**6).seconds > 0


def test_figures_of_another_machine_are_extrapolated():
    assert collective_time(load_hardware("b200"), "all_gather", 10**9, 8).source == "extrapolated"


def test_the_slower_of_flops_and_bytes_counts_and_each_kernel_adds_its_overhead():
    by_flops = 10**15 / (989e12 * H100.flops_efficiency)
    by_bytes = 10**9 / (3.35e12 * H100.memory_efficiency)
    for flops, seconds in ((10**15, by_flops), (10, by_bytes)):
        for kernels in (0, 5):
            found = compute_time(H100, flops, 10**9, "bfloat16", kernels=kernels).seconds
            assert found == pytest.approx(seconds + kernels * H100.kernel_overhead, rel=1e-12)


def test_only_flops_need_a_peak_of_their_dtype():
    assert compute_time(H100, 0, 8, "int64").seconds > 0
    with pytest.raises(ValueError, match=r"dtype must be one that 'h100-8x400gbps' has a peak for, bfloat16.*'int64'"):
        compute_time(H100, 1, 8, "int64")


def test_offloading_is_latency_and_bandwidth():
    assert offload_time(H100, 0) == Timed(0.0, "exact")
    expected = H100.offload.latency + 1e9 / H100.offload.bandwidth
    assert offload_time(H100, 10**9).seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gather", 1, 2), "event_kind must be 'all_gather', .*; found 'gather': did you mean 'all_gather'?"),
        (("all_gather", -1, 2), "nbytes must be a whole number of bytes, at least 0; found -1"),
        (("all_gather", 1, 0), "ranks must be a whole number, at least 1; found 0"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        collective_time(H100, *arguments)
