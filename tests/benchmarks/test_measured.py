"""Estimates of Hugging Face models have the memory that one H100 measured."""

from __future__ import annotations

import pytest

from benchmarks.measured import MeasuredStep, estimate_step, read_steps

pytest.importorskip("transformers", reason="an optional dependency of the tests")


@pytest.mark.parametrize("step", read_steps(), ids=lambda step: step.title)
def test_the_peak_is_within_one_per_cent_of_a_gpus(step: MeasuredStep) -> None:
    assert estimate_step(step).peak == pytest.approx(step.allocated, rel=0.01)
