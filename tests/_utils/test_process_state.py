"""``RandomState.put`` restores generators; searches for garbage rest in a block, and go on after it as before."""

import contextlib
import gc
import random
import threading

import pytest
import torch

from funcshard._utils.process_state import RandomState, without_collection


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


def test_put_leaves_the_generator_of_python_alone_if_it_was_not_taken():
    state, before = RandomState.take(), random.getstate()
    assert state.python is None
    random.random()
    after = random.getstate()
    state.put()
    assert before != after == random.getstate()


# --- searches for garbage -------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["on before", "off before"])
def before(request):
    """Searches are on, or the caller has turned them off."""
    was = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if was else gc.disable)()


def test_searches_rest_in_the_block_and_are_as_before_after_it_even_if_it_fails(before):
    with contextlib.suppress(ZeroDivisionError), without_collection():
        with without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
        _ = 1 / 0
    assert gc.isenabled() is before


def test_blocks_of_two_threads_leave_searches_as_before(before):
    inside, leave = threading.Event(), threading.Event()

    def run():
        with without_collection():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=run)
    with without_collection():
        thread.start()
        inside.wait(60)
    leave.set()
    thread.join()
    assert gc.isenabled() is before
