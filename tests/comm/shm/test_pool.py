"""Pools of memory: what nobody refers to is used again, what somebody refers to never, and nothing is kept for ever."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import os
import pickle
import threading
import weakref
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing  # registers how tensors are pickled for other processes

from funcshard.comm.shm import pool as pools
from funcshard.comm.shm.pool import Pool, fits, map_block, private_block, shared_block, tracked_view

needs_memfd = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd_create")
KINDS = [pytest.param(private_block, id="private"), pytest.param(shared_block, id="shared", marks=needs_memfd)]
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128,
)  # fmt: skip


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def read_at(address: int, numel: int) -> torch.Tensor:
    """What is written there, without a reference to the tensor that it belongs to."""
    return torch.frombuffer((ctypes.c_float * numel).from_address(address), dtype=torch.float32)


@pytest.mark.parametrize("make", KINDS)
def test_a_tensor_takes_the_memory_of_one_that_is_gone(make) -> None:
    pool, places = Pool(make), set()
    for step in range(50):
        first, second = pool.tensor(1000, torch.float32).fill_(step), pool.tensor(3000, torch.int64).fill_(step)
        places |= {first.data_ptr(), second.data_ptr()}
        del first, second
    assert pool.made == len(places) == 2


HOLDERS = {
    "itself": lambda x: x,
    "a view": lambda x: x[5:7],
    "its bytes": lambda x: x.view(torch.uint8),
    "without its graph": lambda x: x.detach(),
    "a parameter": torch.nn.Parameter,
    "its storage": lambda x: x.untyped_storage(),
    "a graph": lambda x: torch.ones(1000, requires_grad=True) * x,
    "a function": lambda x: lambda: x,
}


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("name", HOLDERS)
def test_memory_is_not_used_again_while_somebody_holds(name, make) -> None:
    pool = Pool(make)
    tensor = pool.tensor(1000, torch.float32).fill_(1.0)
    held, place = HOLDERS[name](tensor), tensor.data_ptr()
    del tensor
    for _ in range(3):
        assert pool.tensor(1000, torch.float32).fill_(2.0).data_ptr() != place
    assert bool((read_at(place, 1000) == 1).all())
    del held
    both = [pool.tensor(1000, torch.float32) for _ in range(2)]
    assert place in {each.data_ptr() for each in both}
    assert pool.made == 2


def test_memory_in_a_cycle_comes_back_with_the_garbage() -> None:
    pool = Pool(private_block)
    cycle: list[object] = [pool.tensor(1000, torch.float32)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.tensor(1000, torch.float32).numel() == 1000
    assert pool.made == 1


def test_memory_comes_back_from_another_thread() -> None:
    pool = Pool(private_block)
    for _ in range(20):
        held = [pool.tensor(1000, torch.float32)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
    assert pool.made == 1


@pytest.mark.parametrize("make", KINDS)
def test_a_tensor_outlives_its_pool_and_keeps_its_own_memory_only(make) -> None:
    pool = Pool(make)
    others = [pool.tensor(1000, torch.float32) for _ in range(3)]
    kept = pool.tensor(1000, torch.float32).fill_(3.0)
    weak = weakref.ref(pool)
    del others, pool
    assert weak() is None
    assert bool((kept == 3).all())
    del kept  # with nobody to give it back to


SIZES = {
    # what is taken one after another and given back together, then what is taken, and the size of what comes (None: new)
    "the one that fits best": ([10_000, 5000, 20_000], 5000, 5000),
    "the smallest that is large enough": ([5000, 20_000, 10_000], 6000, 10_000),
    "none is large enough": ([5000, 10_000], 11_000, None),
}


@pytest.mark.parametrize("name", SIZES)
def test_what_is_taken(name) -> None:
    pool = Pool(private_block)
    sizes, size, found = SIZES[name]
    pieces = [pool.take(each)[0] for each in sizes]
    for piece in pieces:
        pool.give_back(piece)
    piece, gone = pool.take(size)
    if found is None:  # the largest has given way
        assert (piece.number, gone, len(piece.memory)) == (len(sizes) + 1, 1 + sizes.index(max(sizes)), size)
    else:
        assert (piece, gone) == (pieces[sizes.index(found)], 0)


@pytest.mark.parametrize("make", KINDS)
def test_little_does_not_take_the_place_of_much(make) -> None:
    pool = Pool(make)
    large, _ = pool.take(1 << 20)
    pool.give_back(large)
    assert pool.take(1 << 18)[0] is not large
    assert pool.take(1 << 20)[0] is large
    pool.give_back(large)
    assert pool.take((1 << 19) + 1)[0] is large


@pytest.mark.parametrize("make", KINDS)
def test_what_nobody_has_needed_for_long_goes(make, monkeypatch) -> None:
    monkeypatch.setattr(pools, "_IDLE_TAKES", 10)
    pool = Pool(make)
    every = [pool.take(5000)[0] for _ in range(6)]  # such as when a whole model is gathered
    before = open_files()
    for piece in every:
        pool.give_back(piece)
    gone = []
    for _ in range(30):
        pieces = [pool.take(5000) for _ in range(2)]
        gone += [number for _, number in pieces if number]
        for piece, _ in pieces:
            pool.give_back(piece)
    assert sorted(gone) == [1, 2, 3, 4]
    assert pool.made == 6
    del every, piece, pieces
    assert open_files() == before - (8 if make is shared_block else 0)  # of each its own, and the mapping's


@needs_memfd
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_process_reads_a_piece_of_every_dtype(dtype) -> None:
    pool = Pool(shared_block)
    piece, _ = pool.take(5000)
    before = open_files()
    theirs = map_block(piece.file)
    assert open_files() == before  # a mapping of another's piece keeps no file open
    own = torch.randint(0, 2, (100,)).to(dtype)
    piece.tensor(100, dtype, offset=128).copy_(own)
    piece.close()
    read = theirs[128 : 128 + own.nbytes].view(dtype)
    assert torch.equal(read.view(torch.uint8), own.view(torch.uint8))
    assert piece.tensor(100, dtype, offset=128).dtype == dtype


USES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "another process": lambda x: pickle.loads(bytes(ForkingPickler.dumps(x))),
    "save": lambda x: saved(x),
    "share_memory_": lambda x: x.share_memory_(),
}


def saved(x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    assert file.tell() < 2 * x.nbytes  # and not all of the piece
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("name", USES)
def test_what_lies_in_a_piece_can_be_copied_and_sent(name, make) -> None:
    pool = Pool(make)
    pool.give_back(pool.take(1 << 20)[0])
    tensor = pool.tensor(5000, torch.float32)
    tensor.copy_(torch.arange(5000.0))
    copied = USES[name](tensor)
    del tensor
    pool.tensor(5000, torch.float32).zero_()
    assert torch.equal(copied, torch.arange(5000.0))


@needs_memfd
def test_a_piece_leaves_nothing_behind() -> None:
    gc.collect()
    before = open_files(), sorted(os.listdir("/dev/shm"))
    pool = Pool(shared_block)
    for size in range(5000, 50_000, 5000):
        piece, _ = pool.take(size)
        theirs = map_block(piece.file)
    tensor = pool.tensor(100, torch.float32)
    del pool, piece, theirs, tensor
    gc.collect()
    assert (open_files(), sorted(os.listdir("/dev/shm"))) == before


@needs_memfd
def test_what_is_mapped_in_inference_mode_may_be_written_to_in_any() -> None:
    piece = shared_block(100)
    assert piece.file is not None
    with torch.inference_mode():
        theirs = map_block(piece.file)
        theirs.fill_(1)
    theirs.fill_(2)
    assert piece.tensor(100, torch.uint8).sum() == 200


def test_a_piece_is_for_more_than_half_of_it() -> None:
    piece = private_block(
        1 << 20
    )  # of a unit's parameters; at two ranks its gradients take half as much, and leave it alone
    sizes = ((1 << 19) - 4, 1 << 19, (1 << 19) + 4, 1 << 20, (1 << 20) + 4)
    assert [fits(piece, size) for size in sizes] == [False, False, True, True, False]


@needs_memfd
def test_the_end_of_a_tensor_in_anothers_memory_is_noticed_once_and_the_memory_stays_that_long() -> None:
    piece = shared_block(100)
    assert piece.file is not None
    theirs, ends = map_block(piece.file), []
    gone = weakref.ref(theirs)
    whole = tracked_view(theirs, 20, torch.float32, lambda _: ends.append(1))
    part = whole[3:]
    del theirs, whole
    gc.collect()
    assert gone() is not None
    part.fill_(7.0)
    assert piece.tensor(20, torch.float32).tolist() == [0.0] * 3 + [7.0] * 17
    assert not ends
    del part
    assert ends == [1]
    assert gone() is None
