"""``RandomState``: ``put`` restores the generators to the state that ``take`` returned."""

import dataclasses
import random

import pytest
import torch

from funcshard._utils.process_state import RandomState


@pytest.fixture(autouse=True)
def _restored():
    state = RandomState.take(python=True)
    yield
    state.put()


def test_put_repeats_the_numbers_of_torch_and_of_python_if_they_were_taken():
    state = RandomState.take(python=True)
    numbers = [(torch.rand(3).tolist(), random.random()) for _ in range(2)]
    assert numbers[0] != numbers[1]
    for _ in range(2):  # a state can be put more than once
        state.put()
        assert (torch.rand(3).tolist(), random.random()) == numbers[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.cpu = torch.get_rng_state()  # type: ignore[misc]


def test_put_leaves_the_generator_of_python_alone_if_it_was_not_taken():
    state, before = RandomState.take(), random.getstate()
    assert state.python is None
    random.random()
    after = random.getstate()
    state.put()
    assert before != after == random.getstate()


def test_taking_and_putting_do_not_initialise_cuda():
    used = torch.cuda.is_initialized()
    state = RandomState.take()
    state.put()
    assert torch.cuda.is_initialized() is used
    assert (state.cuda is None) is not used
