"""The estimate of an operator against the operator: its peak on real tensors, and its collectives."""

import gc

import pytest
import torch

import funcshard as fs
from benchmarks.memory_truth import Case, prepare
from benchmarks.storages import Storages
from funcshard.estimate import Runtime, profile
from funcshard.estimate.walk.operators import run_operator
from tests.core.units import forward_mode

pytestmark = [forward_mode, pytest.mark.slow]

OPERATORS = ["hvp", "gnvp", "linearize", "jvp", "vjp", "grad"]
MOST = 0.01  # largest accepted relative error
CASES = {
    "gpt": Case("gpt"),
    "gpt recomputed": Case("gpt", remat="remat"),
    "gpt hybrid": Case("gpt", "hybrid"),
    "gpt copied": Case("gpt", "no_shard"),
    "gpt in bfloat16": Case("gpt", mixed=True),
    "llama": Case("llama"),
    "convnet": Case("convnet"),
}


def measured(setup, transform):
    """Return the peak of an operator as one rank of a job whose other ranks do not exist, and its events."""
    model, (inputs, targets) = setup.model, setup.batch
    run = fs.fully_shard(setup.apply, setup.plan, setup.mesh, remat=setup.remat)

    def out(shards):
        outputs = run(shards, setup.buffers, inputs)
        return outputs[0] if model.mutable else outputs

    shards, vector = (
        {
            unit.name: {b.key: torch.full((b.shard_numel,), 0.01, dtype=getattr(torch, b.dtype)) for b in unit.buffers}
            for unit in setup.plan.unit_list
        }
        for _ in range(2)
    )
    storages = Storages()
    storages.hold((shards, vector, setup.buffers, setup.batch))
    gc.collect()
    with storages, fs.record_events() as events:
        run_operator(transform, out, lambda outputs: model.loss(outputs, targets), shards, vector)
    return storages.peak["cpu"], tuple(events)


@pytest.mark.nightly(one_in=14)
@pytest.mark.parametrize("transform", OPERATORS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_estimated_peak_is_the_measured_one_and_the_events_are_the_predicted_ones(case, transform):
    setup = prepare(case)
    peak, events = measured(setup, transform)
    (inputs, targets), plan = setup.batch, setup.plan
    options = {"loss": setup.model.loss, "targets": targets, "precision": plan}
    traced = profile(setup.apply, setup.params, setup.buffers, inputs, **options)
    runtime = Runtime(accelerator=False)
    report = fs.estimate(traced, plan, optimizer=None, remat=setup.remat, runtime=runtime, transform=transform)
    assert report.peak == pytest.approx(peak, rel=MOST)
    assert report.events == events
    assert report.events == fs.predict_events(plan, report.schedule, recomputed=setup.remat, transform=transform)
    assert bool(events) == (report.exposed > 0)
    assert report.exposed < report.step_time


@pytest.mark.parametrize("transform", OPERATORS)
def test_without_a_loss_an_operator_takes_the_sum_of_the_outputs(transform):
    net = torch.nn.Linear(3, 2)
    apply, params, buffers = fs.make_functional(net)
    plan, x = fs.make_plan(params, 2), torch.ones(4, 3)
    summed = profile(apply, params, buffers, x, loss=lambda out: torch.stack([out.sum()]).sum())
    report = fs.estimate(profile(apply, params, buffers, x), plan, transform=transform)
    assert report.events == fs.estimate(summed, plan, transform=transform).events
    assert report.peak > 0
