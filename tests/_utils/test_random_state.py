"""``RandomState``: ``put`` restores the generators to the state that ``take`` returned."""

import dataclasses
import random

import pytest
import torch

from funcshard._utils.random_state import RandomState


@pytest.fixture(autouse=True)
def _restored():
    state = RandomState.take(python=True)
    yield
    state.put()


def test_put_repeats_the_numbers_of_torch():
    state = RandomState.take()
    first = torch.rand(3)
    assert not torch.equal(torch.rand(3), first)
    state.put()
    assert torch.equal(torch.rand(3), first)
    state.put()  # a state can be put more than once
    assert torch.equal(torch.rand(3), first)


def test_put_repeats_the_numbers_of_python_if_they_were_taken():
    state = RandomState.take(python=True)
    first = random.random()
    state.put()
    assert random.random() == first


def test_put_leaves_the_generator_of_python_alone_if_it_was_not_taken():
    random.seed(0)
    expected = [random.random() for _ in range(2)]
    random.seed(0)
    state = RandomState.take()
    assert state.python is None
    assert random.random() == expected[0]
    state.put()
    assert random.random() == expected[1]


def test_a_taken_state_does_not_follow_the_generator():
    state = RandomState.take()
    before = state.cpu.clone()
    torch.rand(3)
    assert torch.equal(state.cpu, before)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.cpu = before  # type: ignore[misc]


def test_taking_and_putting_do_not_initialise_cuda():
    used = torch.cuda.is_initialized()
    state = RandomState.take()
    state.put()
    assert torch.cuda.is_initialized() is used
    assert (state.cuda is None) is not used
