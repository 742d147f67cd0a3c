"""Estimates of steps: their collectives are those of real steps, their memory balances, their lanes are possible."""

import dataclasses
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

import funcshard as fs
from funcshard.demo.gpt import GPT, GPTConfig
from funcshard.estimate import Hardware, OptimizerMemory, Runtime, Source, load_hardware
from funcshard.estimate.machine import compute_time
from funcshard.estimate.walk import LANES, HardwareClock
from tests.module.law import Runs, calls_on

MIXED = fs.MixedPrecision(torch.bfloat16, torch.float32)

# Options of make_plan, and of estimate and predict_events.
CASES = {
    "full_shard": ({}, {}),
    "shard_grad_op": ({"strategy": "shard_grad_op"}, {}),
    "no_shard": ({"strategy": "no_shard"}, {}),
    "hybrid": ({"mesh": {"replicate": 2, "shard": 2}}, {}),
    "mixed precision": ({"precision": MIXED}, {}),
    "mixed precision, no_shard": ({"precision": MIXED, "strategy": "no_shard"}, {}),
    "held by two ranks": ({"reshard_after_forward": 2}, {}),
    "buckets": ({"bucket_bytes": 1 << 16}, {}),
    "two micro-batches": ({}, {"accumulate": 2}),
    "two micro-batches, reduced once": ({}, {"accumulate": fs.Accumulation(2, reduce="once")}),
    "two micro-batches, gathered once": (
        {"strategy": "shard_grad_op", "units": {key: {"reshard_after_backward": False} for key in ("", "blocks.*")}},
        {"accumulate": 2},
    ),
    "recomputed": ({}, {"remat": True}),
    "one block recomputed": ({}, {"remat": ["blocks.1"]}),
    "one unit": ({"units": ()}, {}),
    "units in units": ({"units": ["blocks.*", "blocks.*.mlp"]}, {}),
}  # fmt: skip


@functools.cache
def model():
    return fs.make_functional(GPT(GPTConfig(width=16, layers=3, heads=2, context=8)))


def loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@functools.cache
def profile(precision):
    tokens = torch.zeros(2, 8, dtype=torch.long)
    return fs.profile(*model(), tokens, loss=loss, targets=tokens, precision=precision)


def plan_of(mesh=4, units=("blocks.*",), **options):
    return fs.make_plan(model()[1], mesh, units=units, **options)


@functools.cache
def report_of(name, **more):
    options, estimated = CASES[name]
    return fs.estimate(profile(options.get("precision")), plan_of(**options), hardware="h100", **estimated, **more)


@pytest.mark.parametrize("hardware", ["h100", "a100-80gb-8x50gbps"])
@pytest.mark.parametrize("name", CASES)
def test_no_unit_computes_while_it_is_gathered_or_its_gradient_is_reduced(name, hardware):
    options, estimated = CASES[name]
    mesh = {"replicate": 2, "shard": 16} if "mesh" in options else 32
    plan = plan_of(**{**options, "mesh": mesh})
    spans = fs.estimate(profile(options.get("precision")), plan, hardware=hardware, **estimated).spans
    computed, moved = ([span for span in spans if (span.lane == "compute") == is_compute] for is_compute in (True, False))
    assert moved
    for span in moved:
        names = span.unit.split(" + ")
        of_units = [each for each in computed if each.what not in ("loss", "optimizer") and each.unit in names]
        assert all(each.end <= span.begin + 1e-12 or each.begin >= span.end - 1e-12 for each in of_units), span


@pytest.mark.parametrize("runtime", [None, Runtime.fsdp1(), Runtime.fsdp2()], ids=["ours", "FSDP1", "FSDP2"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_ends_with_the_memory_that_it_began_with_and_nothing_overlaps_on_a_lane(name, runtime):
    report = report_of(name, runtime=runtime)
    timeline = report.timeline
    assert timeline[-1].memory == timeline[0].memory
    assert all(size > 0 for moment in timeline for size in moment.memory.values())
    for lane in LANES:
        spans = [span for span in report.spans if span.lane == lane]
        assert all(before.end <= after.begin + 1e-12 for before, after in itertools.pairwise(spans))
    computed = sum(span.seconds for span in report.spans if span.lane == "compute")
    assert report.step_time == pytest.approx(computed + report.exposed)
    assert [moment.seconds for moment in timeline] == sorted(moment.seconds for moment in timeline)


def test_the_first_step_has_no_optimizer_state_until_its_end():
    optimizer = OptimizerMemory(temporaries="foreach", first_step=True)
    first, later = report_of("full_shard", optimizer=optimizer), report_of("full_shard")
    state = later.timeline[0].memory["optimizer"]
    assert "optimizer" not in first.timeline[0].memory
    assert first.timeline[-1].memory["optimizer"] == state == 2 * later.timeline[0].memory["shards"]
    assert first.peak <= later.peak


def test_recomputation_takes_longer_and_is_no_model_flops():
    plain, again = report_of("full_shard"), report_of("recomputed")
    assert again.step_time > plain.step_time
    assert again.flops == plain.flops
    assert again.mfu < plain.mfu


def test_model_flops_are_those_of_the_formula():
    # 6 · (N − N_embedding) + 12 · L · h · s a token, with N of the matrices alone and the head tied to the embedding.
    report, (_, params, _) = report_of("full_shard"), model()
    matrices = sum(p.numel() for name, p in params.items() if p.dim() == 2 and "position" not in name)
    assert report.flops == report.tokens * (6 * matrices + 12 * 3 * 16 * 8)


def test_a_faster_network_exposes_less_and_a_slow_one_binds():
    slow = load_hardware("a100-80gb-8x50gbps")
    plan = plan_of(mesh=64)
    fast, bound = (fs.estimate(profile(None), plan, hardware=hardware) for hardware in ("h100", slow))
    assert bound.exposed > fast.exposed > 0


def test_on_a_cpu_nothing_overlaps_and_no_allocator_reserves_memory():
    cpu = load_hardware("cpu")
    report = fs.estimate(profile(None), plan_of(mesh=2), hardware=cpu)
    assert isinstance(cpu, Hardware)
    assert Runtime.on(cpu.device).overlaps is False
    assert report.exposed == pytest.approx(sum(span.seconds for span in report.spans if span.lane != "compute"))
    assert report.reserved == (0, 0)
    assert "allocator" not in str(report)


def test_the_peak_of_the_hardware_is_that_of_the_dtype_that_computes():
    tokens = torch.zeros(2, 8, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = fs.profile(*model(), tokens, loss=loss, targets=tokens)
    peaks = load_hardware("h100").flops
    for each, dtype in ((profile(None), "float32"), (profile(MIXED), "bfloat16"), (cast, "bfloat16")):
        assert each.compute_dtype == dtype
        plan = plan_of(precision=MIXED if each is profile(MIXED) else None)
        assert fs.estimate(each, plan, hardware="h100").peak_flops == peaks[dtype]


@pytest.mark.parametrize(
    ("options", "name", "source"),
    [
        ({"budget": "1GiB"}, "budget", "given"),
        ({}, "budget", "calibrated"),
        ({}, "peak", "traced"),
        ({"runtime": Runtime(communicators=1)}, "peak", "calibrated"),
        ({}, "reserved", "calibrated"),  # measured on one kind of GPU
        ({"hardware": "a100"}, "reserved", "extrapolated"),
    ],
)
def test_each_number_has_its_source(options, name, source):
    assert fs.estimate(profile(None), plan_of(), **{"hardware": "h100", **options}).sources[name] == source


def test_a_copy_to_the_host_makes_the_step_time_as_uncertain_as_itself():
    h100 = load_hardware("h100")
    sure = {name: Source("a test") for name in h100.sources}
    links = [dataclasses.replace(each, source=Source("a test")) for each in h100.node]
    far = dataclasses.replace(h100.offload, source=Source("a test", "extrapolated"))
    machine = dataclasses.replace(h100, sources=sure, node=links, offload=far)
    for offload, source in ((False, "calibrated"), (True, "extrapolated")):
        report = fs.estimate(profile(None), plan_of(offload=offload), hardware=machine)
        assert report.sources["step_time"] == source


def test_a_small_uncertain_part_leaves_the_step_time_calibrated():
    h100 = load_hardware("h100")
    assert h100.sources["kernel_overhead"].how == "extrapolated"
    assert compute_time(h100, 10**12, 0, "bfloat16", kernels=1).source == "calibrated"
    assert compute_time(h100, 10**6, 0, "bfloat16", kernels=1).source == "extrapolated"
    assert report_of("full_shard").sources["step_time"] == "extrapolated"  # its kernels are tiny
    fast = dataclasses.replace(h100, kernel_overhead=1e-12)
    assert fs.estimate(profile(None), plan_of(), hardware=fast).sources["step_time"] == "calibrated"


def test_a_budget_is_at_most_the_memory_of_the_device():
    memory = load_hardware("h100").memory
    report = fs.estimate(profile(None), plan_of(), hardware="h100", budget=2 * memory)
    assert (report.budget, report.sources["budget"]) == (memory, "calibrated")
    assert report.budget == report_of("full_shard").budget
    assert [report_of("full_shard", budget=1 << bits).fits for bits in (30, 10)] == [True, False]
    assert "Budget: 158.4 GiB is more than the device has, so its memory counts." in str(report)
    assert "more than the device has" not in str(fs.estimate(profile(None), plan_of(), hardware="h100", budget=memory))
    large = dataclasses.replace(load_hardware("h100"), memory=1 << 20)
    answer = fs.auto_plan(profile(None), ranks=2, hardware=large, budget="80GiB", units=["blocks.*"])
    assert answer.fits == (answer.report.peak <= 1 << 20)


def test_the_memory_of_the_device_is_no_given_budget():
    assert "the device's memory, " in str(fs.estimate(profile(None), plan_of(), hardware="h100"))
    small = dataclasses.replace(load_hardware("h100"), memory=1)
    answer = fs.auto_plan(profile(None), ranks=2, hardware=small, units=["blocks.*"])
    sources = [report.sources["budget"] for report in (answer.report, *(each.report for each in answer.changes))]
    assert len(sources) > 2
    assert set(sources) == {"calibrated"}


@pytest.mark.parametrize("apart", [False, True])
def test_without_overlap_the_rank_waits_for_every_collective(apart):
    runtime = Runtime(replicates_apart=apart, overlaps=False)
    report = fs.estimate(profile(None), plan_of(mesh={"replicate": 2, "shard": 2}), hardware="h100", runtime=runtime)
    collectives = [span for span in report.spans if span.lane != "compute"]
    assert "all_reduce" in {span.what for span in collectives}
    assert report.exposed == pytest.approx(sum(span.seconds for span in collectives))


@pytest.mark.parametrize("axes", [{"tensor": 8}, {"tensor": 2, "expert": 2}])
def test_a_plan_that_cuts_no_leaf_along_its_model_axes_is_no_estimate_of_the_uncut_model(axes):
    words = f"no leaf that is local along {' or '.join(map(repr, axes))}: trace one rank's part"
    with pytest.raises(ValueError, match=words):
        fs.estimate(profile(None), plan_of({"shard": 2, **axes}))


def test_model_axes_of_one_rank_and_those_that_leaves_use_are_estimated():
    one, plain = (fs.estimate(profile(None), plan_of(mesh)) for mesh in ({"shard": 2, "tensor": 1}, 2))
    assert (one.peak, one.events) == (plain.peak, plain.events)
    for local in ({"blocks.*.mlp.*": {"tensor": 0}}, {"blocks.0.*": "tensor"}):
        cut = fs.estimate(profile(None), plan_of({"shard": 2, "tensor": 2}, local=local))
        assert cut.events == fs.predict_events(cut.plan, cut.schedule)


def test_backward_computes_modules_of_groups_again():
    plan = plan_of(units=[["blocks.0", "blocks.1"], "blocks.2"])
    remat = ["blocks.2", "blocks.0+blocks.1"]
    assert fs.estimate(profile(None), plan, remat=remat).options["remat"] == ("blocks.0", "blocks.1", "blocks.2")
    assert fs.estimate(profile(None), plan, remat=["*.1"]).options["remat"] == ("blocks.1",)


class Coder(torch.nn.Sequential):
    def encode(self, x):
        return super().forward(x)


def test_a_unit_of_which_only_a_method_runs_has_the_collectives_of_a_run():
    """It was a KeyError."""
    first, coder, last = torch.nn.Linear(4, 4), Coder(torch.nn.Linear(4, 4)), torch.nn.Linear(4, 4)
    net, x = Runs(lambda m, x: m.last(m.coder.encode(m.first(x))), first=first, coder=coder, last=last), torch.ones(2, 4)
    functional, units = fs.make_functional(net), ["first", "coder", "last"]
    report = fs.estimate(fs.profile(*functional, x), fs.make_plan(functional[1], 2, units=units))
    for call in calls_on(2, functional, x, units, how={"methods": {"coder": ["encode"]}}):
        assert call.events == report.events


@pytest.mark.parametrize("units", [[["0", "1"], ["2", "3"], "4", "5"], [["0", "1"], ["2", "3"], ["4", "5"]]])
def test_auto_plan_answers_with_remat_that_fully_shard_takes(units):
    net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(6)))
    traced = fs.profile(*fs.make_functional(net), torch.zeros(512, 16))
    leanest = fs.auto_plan(traced, ranks=8, units=units, budget=1)
    assert not any("+" in name for name in leanest.report.options["remat"])
    assert not any("+" in part for part in leanest.text.split(", ") if "remat" in part)


def test_ranks_of_an_axis_that_lie_on_several_nodes_take_the_links_between_nodes() -> None:
    cluster = load_hardware("h100-8x400gbps")
    event = fs.Event("all_reduce", "blocks.0", "float32", "float32", 1 << 28, "replicate", 2)
    inside, between = (
        HardwareClock(cluster, axes).collective(event)
        for axes in ({"replicate": 2, "shard": 4}, {"replicate": 2, "shard": 8})
    )
    assert between[0] > 2 * inside[0]


def test_frozen_weights_have_no_gradients_in_the_flops_of_a_step():
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
    product = 2 * 16 * 8 * 8
    for frozen, products in ((), 9), ((net[1], net[2]), 3 + 1 + 2), ((net[0],), 3 + 2 + 1):
        for module in net:
            module.requires_grad_(module not in frozen)
        traced = fs.profile(*fs.make_functional(net), torch.zeros(16, 8))
        report = fs.estimate(traced, fs.make_plan(traced.forms, 2))
        assert report.flops == products * product
        assert report.mfu == pytest.approx(report.flops / (report.step_time * load_hardware("h100").flops["float32"]))
