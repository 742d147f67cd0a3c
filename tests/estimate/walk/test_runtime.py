"""Runtimes of peers: which buffers they hold around the same collectives."""

import pytest
import torch

import funcshard as fs
from funcshard.estimate import OptimizerMemory, Runtime, estimate, profile

N, RANKS = 64, 4
WEIGHT, HALF = N * N * 4, N * N * 2  # bytes of a layer in float32 and bfloat16


def report(runtime, strategy="full_shard"):
    apply, params, buffers = fs.make_functional(torch.nn.Sequential(*(torch.nn.Linear(N, N, bias=False) for _ in range(4))))
    precision = fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plan = fs.make_plan(params, RANKS, units=["*"], strategy=strategy, precision=precision)
    traced = profile(apply, params, buffers, torch.zeros(1, N), precision=plan)
    return estimate(traced, plan, runtime=runtime, optimizer=None)


def most(found, category):
    return max(moment.memory.get(category, 0) for moment in found.timeline)


def test_fsdp2_copies_a_gathered_buffer_and_sends_no_cast_shard():
    ours, fsdp2 = report(Runtime()), report(Runtime.fsdp2())
    # Ours: a unit, the next one, and the shard that is cast for it. FSDP2: a unit, its buffer, the
    # buffer of the next one.
    assert most(ours, "gathered") == 2 * HALF + 2 * HALF // RANKS
    assert most(fsdp2, "gathered") == 3 * HALF


def test_fsdp2_holds_one_send_buffer_at_a_time():
    one, two = report(Runtime.fsdp2()), report(Runtime())
    assert most(two, "reduction") - most(one, "reduction") == WEIGHT


def test_freed_units_of_fsdp1_count_until_another_stream_has_passed():
    plain, lingering = report(Runtime()), report(Runtime(lingering=2))
    assert most(lingering, "gathered") - most(plain, "gathered") == 2 * HALF


@pytest.mark.parametrize("runtime", [Runtime.fsdp1(), Runtime.fsdp2(), Runtime()], ids=["fsdp1", "fsdp2", "own"])
def test_nothing_gathered_is_left_after_the_step(runtime):
    assert set(report(runtime).timeline[-1].memory) <= {"shards", "inputs", "loss"}
    assert "gathered" not in report(runtime, "shard_grad_op").timeline[-1].memory


def test_streams_have_pools_of_their_own():
    together = report(Runtime(sent_lives=False))
    apart = report(Runtime(sent_lives=False, streams=True))
    assert apart.peak == together.peak
    assert apart.reserved[0] > together.reserved[0]


MISTAKES = {
    "states": (lambda: OptimizerMemory(states=-1), "states"),
    "temporaries": (lambda: OptimizerMemory(temporaries="some"), "temporaries must be"),
    "lingering": (lambda: Runtime(lingering=-1), "lingering"),
}


@pytest.mark.parametrize(("make", "words"), MISTAKES.values(), ids=MISTAKES)
def test_wrong_numbers_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
