"""Runtimes of peers: which buffers they hold around the same collectives."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from funcshard.estimate import OptimizerMemory, Runtime, estimate, profile

N, RANKS = 64, 4
MIXED = fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WEIGHT, HALF = N * N * 4, N * N * 2  # bytes of a layer in float32 and bfloat16


def report(runtime, ranks=RANKS, **options):
    layers = torch.nn.Sequential(*(torch.nn.Linear(N, N, bias=False) for _ in range(4)))
    traced = profile(*fs.make_functional(layers), torch.zeros(1, N), precision=MIXED)
    plan = fs.make_plan(traced.forms, ranks, units=["*"], precision=MIXED)
    return estimate(traced, plan, runtime=runtime, optimizer=None, **options)


def most(found, category):
    return max(moment.memory.get(category, 0) for moment in found.timeline)


GATHERED = {
    "ours: a unit, the next one, and the shard that is cast for it": (Runtime(), 2 * HALF + 2 * HALF // RANKS),
    "FSDP2: a unit, its buffer, and the buffer of the next one": (Runtime.fsdp2(), 3 * HALF),
    "FSDP1: freed units count until another stream has passed": (Runtime(lingering=2), 4 * HALF + 2 * HALF // RANKS),
    "a CPU: a unit, whose cast shard is free before the next": (Runtime(accelerator=False), 2 * HALF + HALF // RANKS),
}


@pytest.mark.parametrize(("runtime", "size"), GATHERED.values(), ids=GATHERED)
def test_gathered_units_take(runtime, size):
    assert most(report(runtime), "gathered") == size


def test_fsdp2_holds_one_send_buffer_at_a_time():
    one, two = report(Runtime.fsdp2()), report(Runtime())
    assert most(two, "reduction") - most(one, "reduction") == WEIGHT


def test_a_runtime_that_frees_send_buffers_waits_until_they_are_sent():
    found = report(Runtime(frees_first=True), ranks=64, hardware="a100-80gb-8x50gbps")
    sent = [span.end for span in found.spans if span.what == "reduce_scatter"]
    next_begins = [moment.seconds for moment in found.timeline if moment.what == "reduce"][1:]
    assert all(end <= begin for end, begin in zip(sent[:-1], next_begins, strict=True))
    assert most(found, "reduction") < most(report(Runtime(), ranks=64), "reduction")


def test_gradients_that_are_reduced_once_are_held_between_micro_batches():
    # Four gradients in the dtype that is reduced, and one more that is cast on its way.
    once = report(Runtime(), accumulate=fs.Accumulation(2, reduce="once"))
    held = {what: [m.memory["reduction"] for m in once.timeline if m.what == what] for what in ("join", "reduce")}
    assert held["join"][:5] == [number * WEIGHT + HALF for number in range(1, 6)]
    assert held["reduce"][0] == 4 * WEIGHT + HALF + WEIGHT // RANKS


def test_casts_of_local_leaves_are_held_again_for_a_forward_that_runs_again():
    block = lambda: torch.nn.Sequential(torch.nn.Linear(N, 1, bias=False), torch.nn.Linear(1, N, bias=False))  # noqa: E731

    class Twice(torch.nn.Sequential):
        def forward(self, x):
            return checkpoint(lambda x: self[1](self[0](x)), x, use_reentrant=False)

    traced = profile(*fs.make_functional(Twice(block(), block())), torch.zeros(1, N), precision=MIXED)
    plan = fs.make_plan(traced.forms, RANKS, units=["*"], local=["*.1"], precision=MIXED)
    gathered = [m.memory["gathered"] for m in estimate(traced, plan, optimizer=None).timeline if m.what == "gather"]
    # Both blocks for the forward that runs again, and the second for its backward. Each holds the
    # leaf that is cut, and the cast of the local one.
    assert max(gathered) >= 3 * 2 * N * 2


def test_streams_have_pools_of_their_own():
    together = report(Runtime(sent_lives=False))
    apart = report(Runtime(sent_lives=False, streams=True))
    assert apart.peak == together.peak
    assert apart.reserved[0] > together.reserved[0]


def test_a_use_of_memory_that_no_optimizer_has_is_refused():
    with pytest.raises(ValueError, match="temporaries must be"):
        OptimizerMemory(temporaries="some")
