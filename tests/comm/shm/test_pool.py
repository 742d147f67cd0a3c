"""Pools: a block is used again once no tensor refers to it, never before, and idle blocks are dropped."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import pickle
import threading
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing  # registers how tensors are pickled for other processes

from funcshard.comm.shm import pool as pools
from funcshard.comm.shm.pool import Pool, private_block, shared_block
from tests.comm.shm.leftovers import open_files

needs_memfd = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd_create")
KINDS = [pytest.param(private_block, id="private"), pytest.param(shared_block, id="shared", marks=needs_memfd)]


def read_at(address: int, numel: int) -> torch.Tensor:
    """Return the elements at an address, without a reference to the tensor that they belong to."""
    return torch.frombuffer((ctypes.c_float * numel).from_address(address), dtype=torch.float32)


HOLDERS = {
    "itself": lambda x: x,
    "a view": lambda x: x[5:7],
    "its bytes": lambda x: x.view(torch.uint8),
    "its storage": lambda x: x.untyped_storage(),
    "a graph": lambda x: torch.ones(1000, requires_grad=True) * x,
    "a function": lambda x: lambda: x,
}


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("name", HOLDERS)
def test_memory_is_not_used_again_while_something_refers_to_it(name, make) -> None:
    pool = Pool(make)
    tensor = pool.tensor(1000, torch.float32).fill_(1.0)
    held, address = HOLDERS[name](tensor), tensor.data_ptr()
    del tensor
    for _ in range(3):
        assert pool.tensor(1000, torch.float32).fill_(2.0).data_ptr() != address
    assert bool((read_at(address, 1000) == 1).all())
    del held
    both = [pool.tensor(1000, torch.float32) for _ in range(2)]
    assert address in {tensor.data_ptr() for tensor in both}
    assert pool.made == 2


def make_a_cycle(pool: Pool) -> None:
    held: list[object] = [pool.tensor(1000, torch.float32)]
    held.append(held)
    del held
    gc.collect()


def clear_on_a_thread(pool: Pool) -> None:
    held = [pool.tensor(1000, torch.float32)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()


# Why each end makes its tensor: a caller may hold its arguments until the call ends, as where other tests have compiled.
@pytest.mark.parametrize("end", [make_a_cycle, clear_on_a_thread])
def test_memory_comes_back_from_garbage_and_from_another_thread(end) -> None:
    pool = Pool(private_block)
    for _ in range(3):
        end(pool)
    assert pool.made == 1


@pytest.mark.slow
@pytest.mark.parametrize("make", KINDS)
def test_an_idle_block_is_dropped(make, monkeypatch) -> None:
    monkeypatch.setattr(pools, "_IDLE_TAKES", 10)
    pool = Pool(make)
    every = [pool.take(5000) for _ in range(6)]  # as when a whole model is gathered
    before = open_files()
    for block in every:
        pool.give_back(block)
    dropped: list[Any] = []
    monkeypatch.setattr(pool, "drop", lambda block: dropped.append(block.number) or Pool.drop(pool, block))
    for _ in range(30):
        blocks = [pool.take(5000) for _ in range(2)]
        for block in blocks:
            pool.give_back(block)
    assert sorted(dropped) == [1, 2, 3, 4]
    assert pool.made == 6
    del every, block, blocks
    closed = 8 if make is shared_block else 0  # two for each block: its file, and its mapping's copy of it
    assert open_files() == before - closed


USES = {
    "another process": lambda x: pickle.loads(bytes(ForkingPickler.dumps(x))),
    "save": lambda x: saved(x),
    "share_memory_": lambda x: x.share_memory_(),
}


def saved(x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    assert file.tell() < 2 * x.nbytes  # not the whole block
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("name", USES)
def test_a_tensor_in_a_block_can_be_copied_and_sent(name, make) -> None:
    pool = Pool(make)
    pool.give_back(pool.take(1 << 20))
    tensor = pool.tensor(5000, torch.float32)
    tensor.copy_(torch.arange(5000.0))
    copied = USES[name](tensor)
    del tensor
    pool.tensor(5000, torch.float32).zero_()
    assert torch.equal(copied, torch.arange(5000.0))
