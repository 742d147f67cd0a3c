"""Estimates of Hugging Face models have the memory that one H100 measured."""

from __future__ import annotations

import pytest

from benchmarks.measured import MeasuredStep, estimate_step, read_steps
from funcshard.estimate.walk import RESERVED_RUNS

pytest.importorskip("transformers", reason="an optional dependency of the tests")
pytestmark = pytest.mark.slow


@pytest.mark.nightly(one_in=12)
@pytest.mark.parametrize("step", read_steps(), ids=lambda step: step.title)
def test_the_peak_is_within_one_per_cent_of_a_gpus(step: MeasuredStep) -> None:
    assert estimate_step(step).peak == pytest.approx(step.allocated, rel=0.01)


def test_the_band_of_reserved_memory_has_the_least_and_the_most_of_these_steps() -> None:
    factors = sorted(step.reserved / step.allocated for step in read_steps())
    known = sorted(run.factor for run in RESERVED_RUNS if "measured_h100" in run.source)
    assert known == [factors[0], factors[-1]]
