"""Models of other people's packages train as they do without sharding."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import funcshard as fs
from tests.ranks import run_ranks
from tests.zoo.training import TRAINED, Run, train_as_function, train_as_module, train_on_shards

INSTALLED = [name for name, subject in TRAINED.items() if importlib.util.find_spec(subject.package)]
RANKS = 2
# Twenty steps of models that compute in float32 inside, with gradients added in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def assert_equal_runs(actual: Run, expected: Run) -> None:
    torch.testing.assert_close(actual.losses, expected.losses, **TOLERANCE)
    torch.testing.assert_close(actual.params, {name: expected.params[name] for name in actual.params}, **TOLERANCE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the packages, in their own forwards
@pytest.mark.parametrize("name", INSTALLED)
def test_twenty_steps_are_those_of_the_plain_module(name):
    expected = train_as_module(name, RANKS)
    assert expected.losses[-1] < expected.losses[0]
    assert_equal_runs(train_as_function(name, RANKS), expected)
    for run in fs.simulate(lambda mesh: train_on_shards(mesh, name), RANKS):
        assert_equal_runs(run, expected)
    for run in run_ranks(train_on_shards, RANKS, name):
        assert_equal_runs(run, expected)
