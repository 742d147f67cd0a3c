from __future__ import annotations

import pytest
import torch

import funcshard as fs
from funcshard.estimate.machine.measuring import KernelTime, Reference, rates_of, reference_step, times_of
from funcshard.estimate.trace.tape import Op

TINY = Reference(width=16, heads=2, layers=2, batch=2, length=8, vocabulary=11)


def test_kernels_are_counted_as_in_a_trace():
    """The calibrated rates are those of the trace's FLOPs and bytes, so both must count alike."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    apply, params, buffers = fs.make_functional(module)
    x, loss = torch.ones(4, 8), lambda out, _: out.square().mean()
    profile = fs.profile(apply, params, buffers, x, loss=loss, targets=torch.zeros(()))
    traced = [each for each in profile.tape().expanded() if isinstance(each, Op)]
    timed = times_of(lambda: loss(module(x), None).backward())
    assert sum(each.flops for each in timed) == sum(each.flops for each in traced) > 0
    assert sum(each.bytes for each in timed if each.flops) == sum(each.bytes for each in traced if each.flops)
    others = sum(each.bytes for each in timed if not each.flops)
    assert others == pytest.approx(sum(each.bytes for each in traced if not each.flops), rel=0.02)
    assert all(each.seconds >= 0 for each in timed)


def test_the_step_trains():
    train, update, moved = reference_step(TINY)
    kernels = times_of(train)
    assert sum(each.flops for each in kernels) > 0
    assert any(not each.flops for each in kernels)
    update()
    assert [each[:2] for each in times_of(train)] == [each[:2] for each in kernels]
    embedding, norm, head = 11 * 16, 2 * 16, 17 * 11
    block = 4 * 17 * 16 + 2 * 4 * 16 * 16 + 5 * 16 + 4 * 16
    assert moved == 7 * 4 * (embedding + norm + head + 2 * block)


@pytest.mark.parametrize(
    ("seconds", "overhead", "flops", "bandwidth"),
    [
        (4.0, 0.0, 100.0, 10.0),  # the kernels' own times
        (8.0, 0.0, 50.0, 5.0),  # the step is longer than its kernels: both are slower
        (8.0, 2.0, 100.0, 10.0),  # the rest is overhead of two kernels
        (8.0, 9.0, 500.0, 50.0),  # overhead takes at most nine tenths
    ],
)
def test_rates(seconds, overhead, flops, bandwidth):
    runs = [[KernelTime(300, 7, taken), KernelTime(0, 10, 1.0)] for taken in (2.0, 3.0, 99.0)]  # the median counts
    found = rates_of(runs, seconds, overhead)
    assert (found.flops, found.bandwidth) == pytest.approx((flops, bandwidth))
