"""Models of other people's packages equal themselves when they are sharded, in every call."""

from __future__ import annotations

import importlib.util

import pytest

from tests.zoo.law import STRATEGIES, check
from tests.zoo.subjects import SUBJECTS

# Why some here: the packages of the extra `zoo` need gigabytes; `python -m tests.zoo` runs all.
INSTALLED = [subject for subject in SUBJECTS if importlib.util.find_spec(subject.package)]
# One strategy a model: each strategy meets a quarter of them.
CASES = [(subject, list(STRATEGIES)[number % len(STRATEGIES)]) for number, subject in enumerate(INSTALLED)]


@pytest.mark.nightly(one_in=8)
@pytest.mark.filterwarnings("ignore")  # of the packages, in their own forwards
@pytest.mark.parametrize(("subject", "strategy"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_sharded_model_equals_itself_in_three_calls(subject, strategy):
    assert not check(subject, strategy)
