"""Laws of training, over jobs in which all options meet each other; see ``tests/jobs.py``."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import funcshard as fs
from tests.jobs import CHOICES, Job, Training, change_of, covering, is_possible, oracle, run, tolerance
from tests.ranks import run_simulated
from tests.storages import Alive

JOBS = covering()
pytestmark = [
    # torch's own warnings, where units are compiled or traced, and what BatchNorm becomes in low precision.
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("The .grad attribute of a Tensor", "ignored_classes of the precision hold BatchNorm2d")
]


def check(job: Job, folder: Path) -> None:
    """Check that a job equals the plain module, has the bits of its twin, and does what is predicted."""
    if job.compiled:
        torch._dynamo.reset()  # it compiles one function for a limited number of modules
    outcomes, twins, expected = run(job), run(job.plain, folder), oracle(job)
    right = change_of(job, expected.params)
    for outcome, twin in zip(outcomes, twins, strict=True):
        assert outcome.events == outcome.predicted or not job.is_predicted
        assert (change_of(job, outcome.params) - right).norm() <= tolerance(job) * right.norm()
        assert outcome.losses == pytest.approx(expected.losses, abs=1e-12 if job.precision is None else 3e-3)
        for mine, other in ((outcome.params, twin.params), (outcome.buffers, twin.buffers)):
            assert mine.keys() == other.keys()
            assert all(torch.equal(mine[name], other[name]) for name in mine)
        assert outcome.losses == twin.losses
        if job.precision is None:
            torch.testing.assert_close(outcome.buffers, expected.buffers, rtol=1e-12, atol=1e-12)


@pytest.mark.nightly(one_in=5)
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_job_trains_as_the_plain_module_to_the_bits_of_its_plain_twin_which_was_restored(job: Job, tmp_path: Path) -> None:
    check(job, tmp_path)


@pytest.mark.nightly
@given(st.builds(Job, **{name: st.sampled_from(values) for name, values in CHOICES.items()}).filter(is_possible))
@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
def test_any_job_does(tmp_path_factory: pytest.TempPathFactory, job: Job) -> None:
    check(job, tmp_path_factory.mktemp("job"))


SIMULATED = [job for job in JOBS if job.carrier == "simulated" and not job.compiled and not job.traced]


def called_three_times(mesh: fs.Mesh, job: Job) -> Alive:
    """Compare three gradients of the same shards; return the storages that the calls have made."""
    training, alive = Training.of(job, mesh), Alive(lambda nbytes: nbytes > 0)
    evaluate = fs.accumulate(training.loss_fn, job.micro_batches, training.mutable, reduce=job.reduce, weighted=job.weighted)
    results, events = [], []
    for _ in range(3):
        with fs.record_events() as seen, alive:
            results.append(evaluate(training.state.shards, training.state.buffers, training.batches[0]))
        events.append(list(seen))
    for again in results[1:]:
        torch.testing.assert_close(again, results[0], rtol=0, atol=0)
    assert events[2] == events[1]  # the first call may learn the order of units
    return alive


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize("job", SIMULATED, ids=str)
def test_three_calls_are_one_call_and_leave_nothing_in_memory(job: Job) -> None:
    gc.disable()  # so that memory has to be freed by reference counts
    try:
        ranks = run_simulated(called_three_times, job.ranks, job, shape=dict(job.mesh))
        assert all(alive.made for alive in ranks)
        assert sum(alive.now().total() for alive in ranks) == 0
    finally:
        gc.enable()
