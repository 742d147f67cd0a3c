"""Collectives through shared memory: results, messages, reuse of memory, failures. Most ranks here share one process."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import funcshard as fs
from funcshard._utils import default_store
from funcshard.comm.desync import DesyncDetector
from funcshard.comm.shm import transport
from funcshard.comm.shm.backend import SharedMemoryBackend
from tests.collective_oracle import sum_in_order
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memory files and abstract addresses")

LARGE = 20_000  # elements of float32: too many for a slab, and enough for an all-reduce in two phases


class Rank:
    """One of several ranks in one process; it can start any number of collectives before it waits."""

    def __init__(self, rank: int, connections: dict[int, socket.socket], timeout: float) -> None:
        ranks = range(len(connections) + 1)
        self.rank, self.size, self.connections = rank, len(ranks), connections
        self.desync = DesyncDetector("shard", ranks, rank, patience=0.1, connections=tuple(connections.values()))
        self.backend = SharedMemoryBackend(rank, connections, self.desync, timeout)

    def record(self, kind: str, tensor: torch.Tensor) -> int:
        return self.desync.record(kind, "", tensor, self_checking=True)

    def all_gather(self, shard: torch.Tensor) -> tuple[Any, torch.Tensor]:
        out = shard.detach().new_zeros((self.size * shard.shape[0], *shard.shape[1:]))
        return self.backend.all_gather(out, shard, self.record("all_gather", out)), out

    def gather(self, shard: torch.Tensor) -> tuple[Any, torch.Tensor]:
        number = self.record("all_gather", shard.detach().reshape(1, -1).expand(self.size, -1))
        return self.backend.all_gather_shared(shard, number), torch.empty(0)

    def reduce_scatter(self, full: torch.Tensor) -> tuple[Any, torch.Tensor]:
        out = full.detach().new_zeros((full.shape[0] // self.size, *full.shape[1:]))
        return self.backend.reduce_scatter(out, [full.detach().reshape(-1)], self.record("reduce_scatter", full)), out

    def all_reduce(self, tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
        return self.backend.all_reduce(tensor, self.record("all_reduce", tensor)), tensor

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> tuple[Any, torch.Tensor]:
        return self.backend.broadcast(tensor, src, self.record("broadcast", tensor)), tensor


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def some(rank: int, n: int = 8, salt: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=seeded(100 * salt + rank))


def open_files() -> int:
    gc.collect()  # else the garbage of an earlier test may close some between two counts
    return len(os.listdir("/proc/self/fd"))


def named_files() -> set[str]:
    """Return the named files in memory, of all processes."""
    return set(os.listdir("/dev/shm"))


def left_since(before: set[str], seconds: float = 20.0) -> set[str]:
    """Return the new named files that stay: other processes make some for a moment."""
    end = time.monotonic() + seconds
    while (left := named_files() - before) and time.monotonic() < end:
        time.sleep(0.05)
    return left


@contextlib.contextmanager
def ranks(size: int = 2, timeout: float = 60.0) -> Iterator[list[Rank]]:
    connections: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connections[low][high], connections[high][low] = pair
    yield [Rank(rank, each, timeout) for rank, each in enumerate(connections)]
    for each in connections:
        for connection in each.values():
            connection.close()


def finish(started: list[tuple[Any, torch.Tensor]]) -> list[torch.Tensor]:
    """Wait for one collective on every rank, each rank on a thread of its own; return the results."""
    errors: list[BaseException] = []
    outs = [out for _, out in started]
    mode = torch.is_inference_mode_enabled()

    def wait(i: int, work: Any) -> None:
        try:
            with torch.inference_mode(mode):
                found = work.wait()
                outs[i] = outs[i] if found is None else found
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=wait, args=(i, work)) for i, (work, _) in enumerate(started)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for error in errors:
        raise error
    return outs


DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128,
)  # fmt: skip
FORMS = {
    "one element": lambda x: x[:1],
    "tiny": lambda x: x[:6],
    "several pages": lambda x: x[:9000],
    "large": lambda x: x,
    "two dims": lambda x: x[:600].view(20, 30),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype_and_form(dtype, size) -> None:
    with ranks(size) as world:
        for form in FORMS.values():
            inputs = [form(torch.randint(0, 5, (LARGE,), generator=seeded(rank))).to(dtype) for rank in range(size)]
            each = list(zip(world, inputs, strict=True))
            gathering, everywhere = [r.all_gather(x) for r, x in each], [r.broadcast(x.clone(), size - 1) for r, x in each]
            reading = [r.gather(x.reshape(-1)) for r, x in each]
            assert all(torch.equal(out, inputs[-1]) for out in finish(everywhere))
            assert all(torch.equal(out, torch.cat(inputs)) for out in finish(gathering))
            assert all(torch.equal(out, torch.cat(inputs).view(-1)) for out in finish(reading))
            if "float8" in str(dtype):  # torch cannot add these
                continue
            total = sum_in_order(inputs)
            reducing = [r.all_reduce(x.clone()) for r, x in each]
            for _ in range(2):  # waiting twice is waiting once
                assert all(torch.equal(out, total) for out in finish(reducing))
            assert all(torch.equal(out, total) for out in finish([r.reduce_scatter(torch.cat([x] * size)) for r, x in each]))


GIVEN = {
    "strides": lambda x: x.repeat_interleave(2)[::2],
    "a transposed matrix": lambda x: x.view(20, -1).t().contiguous().t(),
    "the middle of another": lambda x: torch.cat([x, x, x])[len(x) : 2 * len(x)],
    "requires grad": lambda x: x.clone().requires_grad_(),
    "a graph behind it": lambda x: x.clone().requires_grad_() * 1,
    "made in inference mode": lambda x: inferred(x),
    "conjugated": lambda x: torch.complex(x, x).conj(),
}


def inferred(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


@pytest.mark.slow
@pytest.mark.parametrize("inference", [False, True], ids=["", "in inference mode"])
@pytest.mark.parametrize("name", GIVEN)
def test_every_kind_of_tensor_may_be_contributed(name, inference) -> None:
    inputs = [GIVEN[name](some(rank, 400)) for rank in range(2)]
    with ranks() as world, torch.inference_mode(inference):
        outs = finish([r.all_gather(x) for r, x in zip(world, inputs, strict=True)])
        read = finish([r.gather(x) for r, x in zip(world, inputs, strict=True)])
        sums = finish([r.reduce_scatter(x) for r, x in zip(world, inputs, strict=True)])
        again = finish([r.all_gather(some(r.rank, LARGE)) for r in world])
        finish([r.gather(some(r.rank, LARGE)) for r in world])
    half = len(inputs[0]) // 2
    assert all(torch.equal(out.view(-1), torch.cat(inputs).view(-1)) for out in outs)
    assert all(torch.equal(out, torch.cat(inputs, -1)) for out in read)  # along the last dim
    assert not any(out.requires_grad for out in outs + read)
    whole = inputs[0].detach() + inputs[1].detach()
    assert torch.equal(torch.cat(sums), whole.resolve_conj())
    assert len(sums[0]) == half
    with ranks() as world:  # the mode has left no trace
        assert torch.equal(finish([r.all_gather(some(r.rank, LARGE)) for r in world])[0], again[0])
        # memory that was first used in one mode can be written to in both
        for mode in (True, True, True, False, False, False):
            with torch.inference_mode(mode):
                assert torch.equal(finish([r.gather(some(r.rank, LARGE)) for r in world])[1], again[0])
                small = [torch.full((LARGE,), rank, dtype=torch.uint8) for rank in range(2)]
                assert torch.equal(finish([r.gather(x) for r, x in zip(world, small, strict=True)])[1], torch.cat(small))


@pytest.mark.slow
def test_hundreds_are_started_before_any_is_waited_for() -> None:
    with ranks() as world:
        before, results = open_files(), []

        def run(rank: Rank) -> None:
            started = [rank.all_gather(some(rank.rank, 8, salt)) for salt in range(700)]
            results.append([(work.wait(), out)[1] for work, out in reversed(started)])

        threads = [threading.Thread(target=run, args=(rank,)) for rank in world]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        for outs in results:
            for salt, out in enumerate(reversed(outs)):
                assert torch.equal(out, torch.cat([some(0, 8, salt), some(1, 8, salt)]))
        assert len(results) == 2
        assert world[0].backend.blocks.pool.made == 1  # one slab
        assert open_files() - before <= 2


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS])
def test_a_message_for_which_there_is_no_room_is_sent_again(error, monkeypatch) -> None:
    original, refused = socket.send_fds, []

    def send(*args: Any) -> int:
        if len(refused) < 3:
            refused.append(args)
            raise OSError(error, "no room")
        return original(*args)

    monkeypatch.setattr(transport.socket, "send_fds", send)
    with ranks() as world:
        outs = finish([rank.all_gather(some(rank.rank)) for rank in world])
        assert torch.equal(outs[1], torch.cat([some(0), some(1)]))
        assert len(refused) == 3


@pytest.mark.slow
def test_a_rank_that_never_reads_is_an_error_and_not_a_hang() -> None:
    def start_many(rank: Rank) -> None:
        for _ in range(1000):
            rank.all_gather(some(0))

    with ranks(timeout=0.3) as (rank, _), pytest.raises(RuntimeError, match=r"Timed out waiting 0\.3 s for rank 1 to read"):
        start_many(rank)


def test_a_file_that_does_not_arrive_is_explained(monkeypatch) -> None:
    with ranks() as world:
        started = [rank.all_gather(some(rank.rank)) for rank in world]
        original = socket.recv_fds

        def receive(*args: Any) -> Any:
            message, files, flags, address = original(*args)
            for file in files:
                os.close(file)
            return message, [], flags, address

        monkeypatch.setattr(transport.socket, "recv_fds", receive)
        with pytest.raises(OSError, match=r"memory of rank 1 cannot be mapped, .* \(ulimit -n\), or .*shared_memory=False"):
            started[0][0].wait()


def test_memory_is_used_again_once_every_rank_has_read_it() -> None:
    with ranks(3) as world:
        made = []
        for salt in range(15):
            for n in (4, 3000, LARGE):
                outs = finish([rank.all_gather(some(rank.rank, n, salt)) for rank in world])
                assert all(torch.equal(out, torch.cat([some(r, n, salt) for r in range(3)])) for out in outs)
            finish([rank.all_reduce(some(rank.rank, LARGE, salt)) for rank in world])
            made.append([rank.backend.blocks.pool.made for rank in world])
        assert made[3] == made[-1]
        assert max(made[-1]) <= 6
        assert all(len(peer.blocks) <= 6 and not peer.received for rank in world for peer in rank.backend.exchange.peers.all)


def test_memory_is_not_used_again_while_a_rank_may_read_it() -> None:
    with ranks() as (fast, slow):
        late = [fast.all_gather(some(0, LARGE, salt)) for salt in range(20)]
        works = [slow.all_gather(some(1, LARGE, salt)) for salt in range(20)]
        for salt, (work, out) in enumerate(late):
            work.wait()
            assert torch.equal(out, torch.cat([some(0, LARGE, salt), some(1, LARGE, salt)]))
        more = [fast.all_gather(some(0, LARGE, salt)) for salt in range(20, 25)]
        for salt, (work, out) in enumerate(works):
            work.wait()
            assert torch.equal(out, torch.cat([some(0, LARGE, salt), some(1, LARGE, salt)]))
        assert len(more) == 5
        assert fast.backend.blocks.pool.made == 25


ORDERS = [(0, 1), (1, 0), (0, 1, 2), (2, 1, 0), (1, 0, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_shared_output_is_in_memory_once_in_every_order_of_ranks(order) -> None:
    with ranks(len(order)) as world:
        for salt in range(20):
            for n in (4, LARGE):
                started = {rank: world[rank].gather(some(rank, n, salt)) for rank in order}
                wholes = finish([started[rank] for rank in range(len(order))])
                wanted = torch.cat([some(rank, n, salt) for rank in range(len(order))])
                assert all(torch.equal(whole, wanted) for whole in wholes)
                wholes[0].fill_(7.0)
                assert all((whole == 7.0).all() for whole in wholes)
                del started, wholes
        assert all(rank.backend.blocks.pool.made <= 5 for rank in world)
        assert all(len(rank.backend._output_tensors) <= 1 for rank in world)
        assert sum(len(rank.backend.exchange.contributions) for rank in world) <= 2 * len(order)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_stacks_of_shards_are_gathered_along_their_last_dim(order) -> None:
    with ranks(len(order)) as world:
        stacks = [some(rank, LARGE).view(2, 5, -1) for rank in range(len(order))]
        started = {rank: world[rank].gather(stacks[rank]) for rank in order}
        for whole in finish([started[rank] for rank in range(len(order))]):
            assert torch.equal(whole, torch.cat(stacks, -1))


@pytest.mark.parametrize("size", [2, 3])
def test_a_shard_that_its_rank_has_copied_to_the_output_is_not_copied_again(size, monkeypatch) -> None:
    with ranks(size) as world:
        started = [rank.gather(some(rank.rank, LARGE)) for rank in reversed(world)][::-1]
        early = finish(started[1:])
        for rank in range(1, size):
            assert world[rank].backend.exchange.peers.all[0].received == {}  # finished
        monkeypatch.setattr(world[0].backend.exchange, "contribution", lambda *_: pytest.fail("copied twice"))
        (late,) = finish(started[:1])
        assert all(torch.equal(whole, torch.cat([some(r, LARGE) for r in range(size)])) for whole in (late, *early))


def test_the_block_of_a_shard_that_peers_have_copied_is_free_as_soon_as_they_finish() -> None:
    with ranks() as (first, second):
        started = [rank.gather(some(rank.rank, LARGE)) for rank in (second, first)]
        assert 2 in second.backend.exchange.contributions
        finish(started)
        second.backend.poll()  # receives the release
        assert 2 not in second.backend.exchange.contributions


@pytest.mark.parametrize("holder", [0, 1])
def test_an_output_that_a_rank_still_holds_is_not_used_again(holder) -> None:
    with ranks() as world:
        held = finish([rank.gather(some(rank.rank, LARGE)) for rank in world])[holder]
        before = held.clone()
        for salt in range(1, 10):
            finish([rank.gather(some(rank.rank, LARGE, salt)) for rank in world])
        assert torch.equal(held, before)
        address = held.data_ptr() if holder == 0 else None
        del held
        finish([rank.all_gather(some(rank.rank)) for rank in world])  # carries the release
        finish([rank.all_gather(some(rank.rank)) for rank in world])
        wholes = [finish([rank.gather(some(rank.rank, LARGE)) for rank in world]) for _ in range(3)]
        assert address is None or address in {whole[0].data_ptr() for whole in wholes}
        assert world[0].backend.blocks.pool.made <= 5


def test_a_shared_output_is_copied_in_inference_mode() -> None:
    with ranks() as world, torch.inference_mode():
        wholes = finish([rank.gather(some(rank.rank, LARGE)) for rank in world])
        wholes[0].zero_()
        assert torch.equal(wholes[1], torch.cat([some(0, LARGE), some(1, LARGE)]))


@pytest.mark.slow
def test_a_shared_output_outlives_its_ranks() -> None:
    before = memory_in_use()
    with ranks() as world:
        wholes = finish([rank.gather(some(rank.rank, LARGE)) for rank in world])
        world.clear()
    gc.collect()
    assert all(torch.equal(whole, torch.cat([some(0, LARGE), some(1, LARGE)])) for whole in wholes)
    del wholes
    gc.collect()
    assert not memory_in_use() - before


def test_a_reduction_is_read_and_its_memory_freed_once_every_rank_has_contributed() -> None:
    with ranks() as world:
        for salt in range(20):
            inputs = [some(rank.rank, LARGE, salt) for rank in world]
            started = [rank.reduce_scatter(x) for rank, x in zip(world, inputs, strict=True)]
            gathering = [rank.all_gather(some(rank.rank)) for rank in world]
            assert all(rank.backend.exchange.in_progress.keys() == {2 * salt + 2} for rank in world)
            total = torch.cat([out for _, out in started])
            assert torch.equal(total, inputs[0] + inputs[1])
            finish(started)
            assert torch.equal(torch.cat([out for _, out in started]), total)
            finish(gathering)
        assert all(rank.backend.blocks.pool.made <= 3 for rank in world)


MEANWHILE = {
    "inference mode": torch.inference_mode()(lambda go_on: go_on()),
    "vmap": lambda go_on: torch.vmap(lambda x: go_on() or x)(torch.ones(2)),
    "a mode": lambda go_on: flop_counter(go_on),
    "grad": lambda go_on: torch.func.grad(lambda x: go_on() or x)(torch.ones(())),
}


def flop_counter(go_on: Any) -> None:
    with FlopCounterMode(display=False):
        go_on()


def test_a_reduction_begun_in_inference_mode_does_not_disturb_other_collectives() -> None:
    with ranks() as world:
        with torch.inference_mode():
            started = [rank.reduce_scatter(some(rank.rank, LARGE)) for rank in world]
        assert torch.equal(finish([rank.all_gather(some(rank.rank)) for rank in world])[0], torch.cat([some(0), some(1)]))
        with torch.inference_mode():
            assert torch.equal(torch.cat(finish(started)), some(0, LARGE) + some(1, LARGE))


@pytest.mark.parametrize("meanwhile", MEANWHILE.values(), ids=MEANWHILE)
def test_a_reduction_is_not_read_inside_a_mode_or_transform(meanwhile) -> None:
    with ranks() as world:
        started = [rank.reduce_scatter(some(rank.rank, LARGE)) for rank in world]
        meanwhile(lambda: [rank.backend.poll() for rank in world] and None)
        assert all(1 in rank.backend.exchange.in_progress for rank in world)
        assert torch.equal(torch.cat(finish(started)), some(0, LARGE) + some(1, LARGE))


def cut_up(full: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return list(full.split([*sizes, full.numel() - sum(sizes)]))


CUTS = {
    "one": [],
    "at the slices": [LARGE // 4] * 3,
    "across them": [17, LARGE // 2],
    "many": [33] * 300,
    "empty parts": [0, 5, 0],
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sizes", CUTS.values(), ids=CUTS)
def test_parts_are_added_up_as_if_they_were_one(sizes, size) -> None:
    with ranks(size) as world:
        fulls = [some(rank.rank, LARGE) for rank in world]
        started = []
        for rank, full in zip(world, fulls, strict=True):
            out, parts = torch.empty(LARGE // size), cut_up(full.clone(), sizes)
            started.append((rank.backend.reduce_scatter(out, parts, rank.record("reduce_scatter", full)), out))
            for part in parts:
                part.zero_()  # its owner may do so now
        total = fulls[0] + fulls[1]
        for full in fulls[2:]:
            total += full
        assert torch.equal(torch.cat(finish(started)), total)
        # only the slices of a rank's peers are in shared memory, not its own
        assert all(len(block.memory) < LARGE * 4 for rank in world for block in rank.backend.blocks.pool._free)


def test_an_interrupted_reduction_raises_and_returns_no_wrong_sum(monkeypatch) -> None:
    def interrupted(out, parts):
        out.add_(1)
        raise KeyboardInterrupt

    with ranks() as world:
        started = [rank.reduce_scatter(some(rank.rank, LARGE)) for rank in world]
        with monkeypatch.context() as patch:
            patch.setattr("funcshard.comm.shm.backend.sum_in_rank_order", interrupted)
            with pytest.raises(KeyboardInterrupt):
                started[0][0].wait()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="interrupted while it added up"):
                started[0][0].wait()
            after = finish([rank.all_gather(some(rank.rank)) for rank in world])  # another collective works
            assert torch.equal(after[0], torch.cat([some(0), some(1)]))
        del started
        assert torch.equal(
            finish([rank.reduce_scatter(some(0, LARGE)) for rank in world])[0], 2 * some(0, LARGE)[: LARGE // 2]
        )


@pytest.mark.slow
def test_a_rank_that_is_ahead_waits_for_a_busy_block(monkeypatch) -> None:
    monkeypatch.setattr("funcshard.comm.shm.pool._WAIT_PER_BYTE", 1.0)
    monkeypatch.setattr("funcshard.comm.shm.pool._MAX_WAIT", 120.0)
    with ranks() as world:
        wholes = finish([rank.gather(some(rank.rank, LARGE)) for rank in world])
        theirs = wholes.pop()
        wholes.clear()
        number = world[0].record("all_gather", torch.empty(2, LARGE))
        begin, started = time.monotonic(), []
        thread = threading.Thread(target=lambda: started.append(world[0].backend.all_gather_shared(some(0, LARGE), number)))
        thread.start()
        time.sleep(0.3)
        assert not started, "it did not wait"
        del theirs
        world[1].backend.poll()  # releases the output
        world[1].backend.exchange.announce()
        thread.join(60)
        assert started
        assert time.monotonic() - begin < 60  # it has not waited for the limit
        assert world[0].backend.blocks.pool.made == 1
        second = world[1].gather(some(1, LARGE))
        finish([(started[0], torch.empty(0)), second])


def test_a_rank_that_is_ahead_does_not_wait_longer_than_the_limit(monkeypatch) -> None:
    monkeypatch.setattr("funcshard.comm.shm.pool._WAIT_PER_BYTE", 1.0)
    monkeypatch.setattr("funcshard.comm.shm.pool._MAX_WAIT", 0.2)
    with ranks() as world:
        theirs = finish([rank.gather(some(rank.rank, LARGE)) for rank in world])
        own = theirs.pop(0)
        del own
        begin = time.monotonic()
        started = world[0].gather(some(0, LARGE))
        assert 0.2 < time.monotonic() - begin < 60  # not a second for each byte
        assert world[0].backend.blocks.pool.made == 2
        finish([started, world[1].gather(some(1, LARGE))])


DROPPED = {
    "a gather": lambda rank: [rank.all_gather(some(rank.rank, LARGE))],
    "many gathers": lambda rank: [rank.all_gather(some(rank.rank, LARGE)) for _ in range(5)],
    "a reduction": lambda rank: [rank.reduce_scatter(some(rank.rank, LARGE))],
    "a shared output": lambda rank: [rank.gather(some(rank.rank, LARGE))],
}


@pytest.mark.slow
@pytest.mark.parametrize("start", DROPPED.values(), ids=DROPPED)
@pytest.mark.parametrize("dropping", [(0,), (1,), (0, 1)], ids=["on the first rank", "on the second", "on both"])
def test_a_collective_that_is_not_waited_for_blocks_nothing(start, dropping) -> None:
    with ranks() as world:
        for step in range(10):
            held = []
            for rank in (world[step % 2], world[1 - step % 2]):
                started = start(rank)
                if rank.rank not in dropping:
                    held.append(started)
                del started
            read = [out for works in zip(*held, strict=True) for out in finish(list(works))]
            if start is DROPPED["a shared output"]:
                assert all(torch.equal(whole, torch.cat([some(0, LARGE), some(1, LARGE)])) for whole in read)
            del held, read
            outs = finish([rank.all_gather(some(rank.rank, 8, step)) for rank in world])
            assert torch.equal(outs[0], torch.cat([some(0, 8, step), some(1, 8, step)]))
        assert all(len(rank.backend.exchange.in_progress) <= len(rank.backend._abandoned) for rank in world)
        assert all(rank.backend.blocks.pool.made <= 12 for rank in world)
        assert all(not peer.received for rank in world for peer in rank.backend.exchange.peers.all)
        assert all(len(rank.backend._output_tensors) <= 1 for rank in world)


@pytest.mark.slow
def test_messages_count_after_their_sender_has_gone_and_after_the_timeout() -> None:
    with ranks(timeout=0.2) as world:
        started = [world[0].all_gather(some(0, 8, 0))]
        gone = [world[1].all_gather(some(1, 8, salt)) for salt in range(3)]
        started += [world[0].all_gather(some(0, 8, salt)) for salt in range(1, 3)]
        time.sleep(0.3)
        world[1].connections[0].close()  # with unread messages
        for salt, (work, out) in enumerate(started):
            work.wait()
            assert torch.equal(out, torch.cat([some(0, 8, salt), some(1, 8, salt)]))
        assert len(gone) == 3
        with pytest.raises(RuntimeError, match="Connection closed by rank 1 of the group"):
            world[0].all_gather(some(0))[0].wait()


@pytest.mark.slow
def test_a_rank_that_does_not_join_is_an_error_after_the_timeout() -> None:
    with ranks(timeout=0.3) as (rank, _):
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"Timed out waiting 0\.3 s for the ranks of one machine"):
            rank.all_gather(some(0))[0].wait()
        assert 0.25 < time.monotonic() - start < 60


DIVERGED = {
    "another size": (lambda r: r.all_gather(some(0)), lambda r: r.all_gather(some(1, 9))),
    "another collective": (lambda r: r.all_gather(some(0)), lambda r: r.all_reduce(some(1, 16))),
    "another size of a shared output": (lambda r: r.gather(some(0)), lambda r: r.gather(some(1, 9))),
    "a far larger shared output": (lambda r: r.gather(some(0)), lambda r: r.gather(some(1, LARGE))),
    "another one before": (lambda r: r.all_gather(some(0)), lambda r: r.record("other", some(0)) and r.all_gather(some(1))),
}  # fmt: skip


@pytest.mark.parametrize("name", DIVERGED)
def test_nothing_is_read_from_a_rank_with_another_history(name) -> None:
    with ranks() as world:
        started = [start(rank) for start, rank in zip(DIVERGED[name], world, strict=True)]
        world[1].all_gather(some(1))
        for rank in world:
            rank.desync.patience = -1.0  # there is no store to look in
        for work, out in started:
            before = out.clone()
            with pytest.raises(
                RuntimeError, match=r"ranks issue different collectives: rank .* after other collectives than|Conn"
            ):
                work.wait()
            assert torch.equal(out, before)


MIXED = {
    "rank 0 issues the shared one": (lambda r: r.gather(some(0)), lambda r: r.all_gather(some(1))),
    "rank 1 issues the shared one": (lambda r: r.all_gather(some(0)), lambda r: r.gather(some(1))),
}


@pytest.mark.parametrize("starts", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("first", [0, 1])
def test_a_shared_and_a_plain_all_gather_of_one_number_read_nothing_wrong(starts, first) -> None:
    with ranks() as world:
        started = {rank: starts[rank](world[rank]) for rank in (first, 1 - first)}
        errors = 0
        for rank, (work, out) in started.items():
            world[rank].desync.patience = -1.0
            try:
                whole = work.wait()
            except RuntimeError as error:
                assert "ranks issue different collectives" in str(error)  # noqa: PT017
                errors += 1
            else:
                assert torch.equal(out if whole is None else whole, torch.cat([some(0), some(1)]))
        assert errors == 1


@pytest.mark.slow
def test_worlds_made_and_dropped_leave_nothing_behind() -> None:
    def once() -> None:
        with ranks(3) as world:
            for n in (8, LARGE):
                finish([rank.all_reduce(some(rank.rank, n)) for rank in world])
            world[1].all_gather(some(1))

    once()
    named, before = named_files(), (open_files(), memory_in_use())
    gc.disable()  # reference cycles would stay
    try:
        for _ in range(50):
            once()
        assert (len(os.listdir("/proc/self/fd")), memory_in_use()) == before
        assert not left_since(named)
    finally:
        gc.enable()


def memory_in_use() -> set[tuple[str, int]]:
    """Return the memory files that this process has mapped or open, each with its number.

    Why numbers: an earlier test may have left some in this process.
    """
    found = set()
    with open("/proc/self/maps") as maps:
        found |= {("mapped", int(line.split()[4])) for line in maps if "memfd:funcshard" in line}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread closed it meanwhile
            if "memfd" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(("open", os.stat(f"/proc/self/fd/{name}").st_ino))
    return found


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(150, 150)  # 90 kB: gathered into a shared output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def train_and_hold(mesh: fs.Mesh, shared_memory: bool) -> dict[str, Any]:
    """Train, and keep the gathered parameters and the unreduced gradients of the second step."""
    mesh = fs.init_mesh(mesh.shape, device="cpu", shared_memory=shared_memory)
    apply, params, buffers = fs.make_functional(torch.nn.Sequential(Block(), Block(), Block()))
    plan = fs.make_plan(params, mesh, units=["0", "1", "2"])
    held: list[torch.Tensor] = []
    gathered: list[torch.Tensor] = []
    step = 0

    def loss_fn(shards: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
        if step == 1:
            with torch.no_grad():
                gathered.extend(fs.gather(shards, plan, mesh).values())
        return sharded(shards, buffers, x).square().mean()

    def on_grads(unit: str, grads: dict[str, torch.Tensor]) -> None:
        if step == 1:
            held.extend(grads.values())

    sharded = fs.fully_shard(apply, plan, mesh)
    train = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.SGD, lr=0.1), plan, mesh, on_grads=on_grads)
    state = train.init(fs.shard(params, plan, mesh), buffers)
    group = mesh.shard
    made, losses, copies = [], [], []
    for step in range(12):
        state, metrics = train(state, some(mesh.rank, 300, step).view(2, 150))
        losses.append(metrics["loss"].item())
        if step == 1:
            copies = [x.clone() for x in (*held, *gathered)]
        made.append((group.pool.made, group.shm.blocks.pool.made if group.shm is not None else 0))
    unchanged = [torch.equal(now, before) for now, before in zip((*held, *gathered), copies, strict=True)]
    final = fs.gather(state.shards, plan, mesh)
    return {
        "carrier": type(group._carrier).__name__,
        "unchanged": unchanged,
        "made": made,
        "losses": losses,
        "sums": [x.double().sum().item() for x in final.values()],
    }


@pytest.mark.slow
def test_training_uses_memory_again_and_changes_no_tensor_that_is_still_held() -> None:
    shared, gloo = run_ranks(train_and_hold, 2, True), run_ranks(train_and_hold, 2, False)
    assert [each.pop("carrier") for each in shared + gloo] == ["SharedMemoryBackend"] * 2 + ["Gloo"] * 2
    for each in shared + gloo:
        unchanged, made = each.pop("unchanged"), each.pop("made")
        assert len(unchanged) == 12  # two leaves of three units, and their gradients
        assert all(unchanged)
        assert max(made[-1]) <= 20, made  # without reuse more than 70
    assert shared == gloo


def keep_a_gathered_tensor(mesh: fs.Mesh) -> tuple[bool, set[tuple[str, int]]]:
    before = memory_in_use()
    mesh = fs.init_mesh(mesh.shape, device="cpu")
    params = {"w": some(0, LARGE)}
    plan = fs.make_plan(params, mesh)
    full = fs.gather(fs.shard(params, plan, mesh), plan, mesh)["w"]
    fs.psum(torch.ones(1), mesh)
    del mesh, plan
    gc.collect()
    return torch.equal(full, params["w"]), memory_in_use() - before


def test_only_gathered_tensors_outlive_their_mesh() -> None:
    assert run_ranks(keep_a_gathered_tensor, 2, shape={"shard": 2}) == [(True, set())] * 2


def go_on_without_the_last(mesh: fs.Mesh) -> tuple[str, float, tuple[Any, ...]]:
    named, before = named_files(), memory_in_use()
    mesh = fs.init_mesh(mesh.shape, device="cpu", patience=0.3)
    message = ""
    for step in range(10):
        if step == 4 and mesh.rank == mesh.world_size - 1:
            works = [mesh.shard.all_gather(torch.empty(3 * LARGE), some(0, LARGE)) for _ in range(3)]
            os.kill(os.getpid(), signal.SIGKILL)
            del works
        start = time.monotonic()
        try:
            fs.psum(some(mesh.rank, LARGE), mesh)
        except RuntimeError as error:
            message = str(error)
            break
    seconds = time.monotonic() - start
    del mesh
    gc.collect()
    return message, seconds, (memory_in_use() - before, left_since(named))


@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_an_error_and_nothing_else() -> None:
    *survivors, killed = run_ranks(go_on_without_the_last, 3, may_die={2}, timeout=30)
    assert killed is None
    for message, seconds, left in survivors:
        assert "ranks issue different collectives" in message or "Connection closed by rank" in message
        assert seconds < 20  # the timeout of the group is 90 s
        assert left == (set(), set())


def functions_of(thread: int) -> set[str]:
    """Return the names of the functions that a thread is in."""
    frame, found = sys._current_frames().get(thread), set()
    while frame is not None:
        found.add(frame.f_code.co_name)
        frame = frame.f_back
    return found


def interrupt(mesh: fs.Mesh) -> list[float]:
    """Interrupt rank 0 with Ctrl-C while it waits; then all ranks go on."""
    mesh = fs.init_mesh(mesh.shape, device="cpu")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store, own = default_store(), threading.get_ident()

    def interrupt_the_wait() -> None:
        while "wait_and_compare" not in functions_of(own):
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    try:
        x = torch.tensor([float(mesh.rank)])
        if mesh.rank == 1:
            store.wait(["rank 0 was interrupted"])
            fs.psum(x, mesh)
        else:
            threading.Thread(target=interrupt_the_wait).start()
            with pytest.raises(KeyboardInterrupt):
                fs.psum(x, mesh)
            store.set("rank 0 was interrupted", "")
        return [fs.psum(torch.tensor(float(step)), mesh).item() for step in range(4)]
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.slow
def test_ranks_go_on_after_one_was_interrupted_in_a_wait() -> None:
    assert run_ranks(interrupt, 2) == [[0.0, 2.0, 4.0, 6.0]] * 2


def raise_in_backward(mesh: fs.Mesh, raising: tuple[int, ...]) -> tuple[str, list[float], int]:
    """Raise in the middle of backward on some ranks, catch the error, and go on with the next step."""
    mesh = fs.init_mesh(mesh.shape, device="cpu", patience=0.2)
    apply, params, buffers = fs.make_functional(torch.nn.Sequential(Block(), Block(), Block()))
    plan = fs.make_plan(params, mesh, units=["0", "1", "2"])
    sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
    met, losses = [], []

    def on_grads(unit: str, grads: Any) -> None:
        met.append(unit)
        if step % 3 == 1 and mesh.rank in raising and unit == "1":
            raise ValueError("no good")

    run = fs.value_and_grad(lambda s, x: sharded(s, buffers, x).square().mean(), on_grads=on_grads)
    for step in range(9):  # noqa: B007  # on_grads reads it
        try:
            losses.append(run(shards, torch.ones(2, 150))[0].item())
        except ValueError:
            continue
        except RuntimeError as error:
            return str(error), losses, 0
    return "", losses, mesh.shard.shm.blocks.pool.made


def test_ranks_that_all_raise_in_backward_go_on() -> None:
    first, second = run_ranks(raise_in_backward, 2, (0, 1))
    assert first[0] == second[0] == ""
    assert len(first[1]) == 6
    assert len(set(first[1])) == 1
    assert max(first[2], second[2]) <= 16  # blocks of the three steps that raised may wait for the garbage collector


def test_a_rank_that_raises_alone_and_goes_on_is_detected() -> None:
    for message, losses, _ in run_ranks(raise_in_backward, 2, (1,)):
        assert message.startswith("ranks issue different collectives: number ")
        assert len(losses) <= 1


def use_several_groups_at_once(mesh: fs.Mesh) -> bool:
    meshes = [
        mesh,
        mesh.reshaped({"shard": 4}),
        mesh.reshaped({"replicate": 4}),
        mesh.reshaped({"replicate": 2, "shard": 2}),
    ]
    groups = [group for each in meshes for _, group in each.axes]
    good = True
    for step in range(5):
        outs = [torch.empty(group.size * 5000) for group in groups]
        shards = [some(group.global_rank, 5000, step) for group in groups]
        works = [group.all_gather(out, shard) for group, out, shard in zip(groups, outs, shards, strict=True)]
        for work in works[::-1]:
            work.wait()
        members = [[int(text) for text in group.all_gather_text(str(group.global_rank))] for group in groups]
        for out, ranks_of_group in zip(outs, members, strict=True):
            good &= torch.equal(out, torch.cat([some(member, 5000, step) for member in ranks_of_group]))
        for each in meshes:
            good &= fs.psum(torch.tensor(1.0), each).item() == 4
    return good and all(isinstance(group._carrier, SharedMemoryBackend) for group in groups)


@pytest.mark.slow
def test_several_groups_are_used_at_once() -> None:
    assert run_ranks(use_several_groups_at_once, 4, shape={"replicate": 2, "shard": 2}) == [True] * 4
