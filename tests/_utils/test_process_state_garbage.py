"""Searches for garbage rest in a block, and go on after it as before."""

import gc
import threading

import pytest
import torch

import funcshard as fs
from funcshard._utils.process_state import without_collection


@pytest.fixture(params=[True, False], ids=["on before", "off before"])
def before(request):
    """Searches are on, or the caller has turned them off."""
    was = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if was else gc.disable)()


def test_searches_rest_in_the_block_and_are_as_before_after_it(before):
    with without_collection():
        with without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
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


def test_a_profile_that_fails_leaves_searches_as_before(before):
    apply, params, buffers = fs.make_functional(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="must be a scalar"):
        fs.profile(apply, params, buffers, torch.zeros(1, 2), loss=lambda out: out)
    assert gc.isenabled() is before
