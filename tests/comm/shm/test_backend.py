"""Collectives through shared memory: results, messages, reuse of memory, failures. Most ranks here share one process."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.comm.desync import DesyncDetector
from funcshard.comm.group import Op
from funcshard.comm.shm import exchange as exchanges
from funcshard.comm.shm.backend import SharedMemoryBackend
from funcshard.comm.shm.exchange import Exchange
from funcshard.comm.watch import Limits
from tests.collective_oracle import sum_in_order
from tests.comm.shm.leftovers import memory_in_use
from tests.core.units import of_module
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memory files and abstract addresses")

LARGE = 24_000  # elements of float32: too many for a slab, and enough for an all-reduce in two phases


class Rank:
    """One of several ranks in one process; it can start any number of collectives before it waits.

    Each collective takes a tensor and returns its work, and the tensor with the result unless the
    work returns it. ``MEANT`` says what the result is.
    """

    def __init__(self, rank: int, connections: dict[int, socket.socket], timeout: float) -> None:
        ranks = range(len(connections) + 1)
        self.rank, self.size, self.connections = rank, len(ranks), connections
        self.desync = DesyncDetector("shard", ranks, rank, limits=Limits(0.1), connections=tuple(connections.values()))
        self.backend = SharedMemoryBackend(Exchange(rank, connections, self.desync, timeout))

    def start(self, kind: str, numel: int, *args: Any) -> Any:
        op = Op(kind, "", *args)
        dtype = (op.data if op.out is None else op.out).dtype
        number = self.desync.record(kind.removesuffix("_shared"), "", dtype, numel, self_checking=True)
        return getattr(self.backend, kind)(op, number)

    def all_gather(self, shard: torch.Tensor) -> tuple[Any, torch.Tensor]:
        out = shard.detach().new_zeros((self.size * shard.shape[0], *shard.shape[1:]))
        return self.start("all_gather", out.numel(), out, shard), out

    def all_gather_shared(self, shard: torch.Tensor) -> tuple[Any, torch.Tensor]:
        return self.start("all_gather_shared", shard.numel() * self.size, None, shard), torch.empty(0)

    def reduce_scatter(self, full: torch.Tensor) -> tuple[Any, torch.Tensor]:
        out = full.detach().new_zeros((full.shape[0] // self.size, *full.shape[1:]))
        return self.start("reduce_scatter", full.numel(), out, [full.detach().reshape(-1)]), out

    def all_reduce(self, tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        return self.start("all_reduce", total.numel(), total), total

    def broadcast(self, tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Broadcast from the last rank."""
        out = tensor.detach().clone(memory_format=torch.contiguous_format)
        return self.start("broadcast", out.numel(), out, None, self.size - 1), out


# The result of each collective on a rank, from the tensors of all ranks.
MEANT = {
    "all_gather": lambda xs, rank: torch.cat(xs),
    "all_gather_shared": lambda xs, rank: torch.cat(xs, -1),
    "reduce_scatter": lambda xs, rank: sum_in_order(xs).chunk(len(xs))[rank],
    "all_reduce": lambda xs, rank: sum_in_order(xs),
    "broadcast": lambda xs, rank: xs[-1],
}


def some(rank: int, n: int = 8, salt: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * salt + rank))


@contextlib.contextmanager
def ranks(size: int = 2, timeout: float = 60.0) -> Iterator[list[Rank]]:
    connections: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low, high in itertools.combinations(range(size), 2):
        connections[low][high], connections[high][low] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield [Rank(rank, to_peers, timeout) for rank, to_peers in enumerate(connections)]
    for to_peers in connections:
        for connection in to_peers.values():
            connection.close()


def finish(started: Sequence[tuple[Any, torch.Tensor]]) -> list[torch.Tensor]:
    """Wait for one collective on every rank, each rank on its own thread; return the results."""
    errors: list[BaseException] = []
    outs = [out for _, out in started]
    mode = torch.is_inference_mode_enabled()

    def wait(i: int, work: Any) -> None:
        try:
            with torch.inference_mode(mode):
                result = work.wait()
                outs[i] = outs[i] if result is None else result
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


def run(world: list[Rank], kind: str, inputs: Sequence[torch.Tensor], order: Sequence[int] = ()) -> list[torch.Tensor]:
    """Start a collective on all ranks in an order, wait for it, and return its results, which are right."""
    started = {rank: getattr(world[rank], kind)(inputs[rank]) for rank in order or range(len(world))}
    results = finish([started[rank] for rank in range(len(world))])
    for rank, result in enumerate(results):
        assert torch.equal(result, MEANT[kind]([x.detach().resolve_conj() for x in inputs], rank)), (kind, rank)
    return results


def run_some(world: list[Rank], kind: str = "all_gather", n: int = 8, salt: int = 0) -> list[torch.Tensor]:
    return run(world, kind, [some(rank.rank, n, salt) for rank in world])


DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128,
)  # fmt: skip
FORMS = {
    "one element": lambda x: x[:1],
    "tiny": lambda x: x[:12],
    "several pages": lambda x: x[:9000],
    "large": lambda x: x,
    "two dims": lambda x: x[:600].view(12, 50),
    "large in two dims": lambda x: x.view(12, -1),
    "strides": lambda x: torch.stack([x, x], 1)[:, 0],
    "a transposed matrix": lambda x: x.view(12, -1).t().contiguous().t(),
    "the middle of another": lambda x: torch.cat([x, x, x])[len(x) : 2 * len(x)],
    "requires grad": lambda x: x.clone().requires_grad_(x.is_floating_point()),
    "a graph behind it": lambda x: x.clone().requires_grad_(x.is_floating_point()).view_as(x),
    "made in inference mode": torch.inference_mode()(torch.clone),
    "conjugated": torch.conj,
}


@pytest.mark.slow
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), *((3, dtype) for dtype in DTYPES)], ids=str)
def test_every_collective_of_every_kind_of_tensor(size, dtype) -> None:
    forms = [*FORMS] if dtype == torch.float32 else ["tiny", "several pages", "conjugated"]
    draw, adds = Random(size), "float8" not in str(dtype)  # torch cannot add these
    numbers = [torch.randint(0, 5, (LARGE,), generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    if dtype.is_floating_point:
        numbers = [number + some(rank, LARGE) for rank, number in enumerate(numbers)]
    with ranks(size) as world:
        for form, kind, inference in itertools.product(forms, MEANT, {False, dtype == torch.float32}):
            inputs = [FORMS[form](number.to(dtype)) for number in numbers]
            if ("reduce" not in kind or adds) and (kind != "reduce_scatter" or len(inputs[0]) % size == 0):
                with torch.inference_mode(inference):
                    results = run(world, kind, inputs, draw.sample(range(size), size))
                assert not any(result.requires_grad for result in results)


def test_waiting_twice_is_waiting_once() -> None:
    with ranks() as world:
        for kind in ("all_reduce", "reduce_scatter", "all_gather_shared"):
            started = [getattr(rank, kind)(some(rank.rank, LARGE)) for rank in world]
            once = [result.clone() for result in finish(started)]
            assert all(map(torch.equal, finish(started), once))


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
            out, parts = torch.empty(LARGE // size), list(full.clone().split([*sizes, LARGE - sum(sizes)]))
            started.append((rank.start("reduce_scatter", full.numel(), out, parts), out))
            for part in parts:
                part.zero_()  # its owner may do so now
        assert torch.equal(torch.cat(finish(started)), sum_in_order(fulls))
        # only the slices of a rank's peers are in shared memory, not its own
        assert all(len(block) < LARGE * 4 for rank in world for block in rank.backend.blocks._free)


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS])
def test_a_message_for_which_there_is_no_room_is_sent_again(error, monkeypatch) -> None:
    original, failures = socket.send_fds, []

    def send(*args: Any) -> int:
        if len(failures) < 3:
            failures.append(args)
            raise OSError(error, "no room")
        return original(*args)

    monkeypatch.setattr(exchanges.socket, "send_fds", send)
    with ranks() as world:
        run_some(world)
        assert len(failures) == 3


LATE = {
    "does not join": (lambda rank: rank.all_gather(some(0))[0].wait(), "the ranks of one machine"),
    "never reads": (lambda rank: [rank.all_gather(some(0)) for _ in range(1000)], "rank 1 to read"),
}


@pytest.mark.slow
@pytest.mark.parametrize("peer", LATE)
def test_a_peer_that_is_not_there_is_an_error_after_the_timeout(peer) -> None:
    call, words = LATE[peer]
    with ranks(timeout=0.3) as (rank, _):
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=rf"Timed out waiting 0\.3 s for {words}"):
            call(rank)
        assert 0.25 < time.monotonic() - start < 60


@pytest.mark.slow
def test_messages_count_after_their_sender_has_gone_and_after_the_timeout() -> None:
    before = memory_in_use()
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
        world.clear()
    del started, gone, work, out
    gc.collect()
    assert not memory_in_use() - before


DIVERGED = {
    "another size": (lambda r: r.all_gather(some(0)), lambda r: r.all_gather(some(1, 9))),
    "another collective": (lambda r: r.all_gather(some(0)), lambda r: r.all_reduce(some(1, 16))),
    "another size of a shared output": (lambda r: r.all_gather_shared(some(0)), lambda r: r.all_gather_shared(some(1, 9))),
    "a far larger one": (lambda r: r.all_gather_shared(some(0)), lambda r: r.all_gather_shared(some(1, LARGE))),
    "another one before": (lambda r: r.all_gather(some(0)), lambda r: r.desync.record("a", "") and r.all_gather(some(1))),
}  # fmt: skip


@pytest.mark.parametrize("name", DIVERGED)
def test_nothing_is_read_from_a_rank_with_another_history(name) -> None:
    with ranks() as world:
        started = [start(rank) for start, rank in zip(DIVERGED[name], world, strict=True)]
        world[1].all_gather(some(1))
        for rank in world:
            rank.desync.limits = Limits(-1.0)  # there is no store to look in
        words = r"ranks issue different collectives: rank .* after other collectives than|Conn"
        for work, out in started:
            before = out.clone()
            with pytest.raises(RuntimeError, match=words):
                work.wait()
            assert torch.equal(out, before)


@pytest.mark.parametrize("kinds", list(itertools.permutations(["all_gather", "all_gather_shared"])), ids=str)
@pytest.mark.parametrize("first", [0, 1])
def test_a_shared_and_a_plain_all_gather_of_one_number_read_nothing_wrong(kinds, first) -> None:
    with ranks() as world:
        started = {rank: getattr(world[rank], kinds[rank])(some(rank)) for rank in (first, 1 - first)}
        errors = 0
        for rank, (work, out) in started.items():
            world[rank].desync.limits = Limits(-1.0)
            try:
                whole = work.wait()
            except RuntimeError as error:
                assert "ranks issue different collectives" in str(error)  # noqa: PT017
                errors += 1
            else:
                assert torch.equal(out if whole is None else whole, torch.cat([some(0), some(1)]))
        assert errors == 1


ORDERS = [(0, 1), (2, 1, 0)]
# What each rank starts in every step, and how many blocks of a rank are enough for all steps.
REPEATED: dict[str, tuple[list[tuple[str, int]], int]] = {
    "gathers": ([("all_gather", 4), ("all_gather", 3000), ("all_gather", LARGE)], 3),
    "large gathers": ([("all_gather", LARGE)] * 5, 6),
    "reductions": ([("reduce_scatter", LARGE)], 3),
    "shared outputs": ([("all_gather_shared", 12), ("all_gather_shared", LARGE)], 5),
    "sums": ([("all_reduce", LARGE)], 4),
}
# A large sum of three ranks needs all of them to wait for its first phase.
ALL_WAIT, SOME_DROP = (), ((0, 1), (0,))
DROPPED = [(name, d) for name in REPEATED if name != "sums" for d in SOME_DROP] + [(name, ALL_WAIT) for name in REPEATED]


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize(("name", "dropping"), DROPPED, ids=str)
def test_memory_is_used_again_also_of_collectives_that_ranks_do_not_wait_for(name, dropping) -> None:
    collectives, most = REPEATED[name]
    for order in ORDERS:
        made, waiting = [], [rank for rank in range(len(order)) if rank not in dropping]
        with ranks(len(order)) as world:
            for step in range(8):
                started = {}
                for rank in order:
                    works = [getattr(world[rank], kind)(some(rank, n, step)) for kind, n in collectives]
                    if rank in waiting:
                        started[rank] = works
                    del works
                for i, (kind, n) in enumerate(collectives):
                    inputs = [some(rank, n, step) for rank in range(len(order))]
                    results = finish([started[rank][i] for rank in waiting])
                    assert all(map(torch.equal, results, [MEANT[kind](inputs, rank) for rank in waiting]))
                    if kind == "all_gather_shared" and results:  # it is in memory once
                        results[0].fill_(7.0)
                        assert all((whole == 7.0).all() for whole in results)
                del started, results
                run_some(world, salt=step)
                made.append(max(rank.backend.blocks.made for rank in world))
            assert made[-1] <= most, made
            assert dropping or made[-1] == made[5], made
            for rank in world:
                exchange = rank.backend.exchange
                assert len(exchange.in_progress) <= len(rank.backend._abandoned)
                assert len(rank.backend._output_tensors) <= 1
                assert len(exchange.contributions) <= 3
                assert all(len(peer.blocks) <= most and not peer.received for peer in exchange.peers)


def test_memory_is_not_used_again_while_a_rank_may_read_it() -> None:
    with ranks() as (fast, slow):
        late = [fast.all_gather(some(0, LARGE, salt)) for salt in range(20)]
        works = [slow.all_gather(some(1, LARGE, salt)) for salt in range(20)]
        for started in (late, works):
            for salt, (work, out) in enumerate(started):
                work.wait()
                assert torch.equal(out, torch.cat([some(0, LARGE, salt), some(1, LARGE, salt)]))
            if started is late:
                more = [fast.all_gather(some(0, LARGE, salt)) for salt in range(20, 25)]
        assert len(more) == 5
        assert fast.backend.blocks.made == 25


@pytest.mark.parametrize("holder", [0, 1])
def test_an_output_that_a_rank_still_holds_is_not_used_again(holder) -> None:
    with ranks() as world:
        held = run_some(world, "all_gather_shared", LARGE)[holder]
        before = held.clone()
        for salt in range(1, 10):
            run_some(world, "all_gather_shared", LARGE, salt)
        assert torch.equal(held, before)
        address = held.data_ptr() if holder == 0 else None
        del held
        for _ in range(2):  # the first carries the release
            run_some(world)
        wholes = [run_some(world, "all_gather_shared", LARGE) for _ in range(3)]
        assert address is None or address in {whole[0].data_ptr() for whole in wholes}
        assert world[0].backend.blocks.made <= 5


def test_a_shared_output_is_copied_in_inference_mode() -> None:
    with ranks() as world, torch.inference_mode():
        wholes = run_some(world, "all_gather_shared", LARGE)
        wholes[0].zero_()
        assert torch.equal(wholes[1], torch.cat([some(0, LARGE), some(1, LARGE)]))


@pytest.mark.slow
def test_a_shared_output_outlives_its_ranks() -> None:
    before = memory_in_use()
    with ranks() as world:
        wholes = run_some(world, "all_gather_shared", LARGE)
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
            for outs in ([out for _, out in started], finish(started)):
                assert torch.equal(torch.cat(outs), inputs[0] + inputs[1])
            finish(gathering)
        assert all(rank.backend.blocks.made <= 3 for rank in world)


MEANWHILE = {
    "inference mode": torch.inference_mode()(lambda go_on: go_on()),
    "grad": lambda go_on: torch.func.grad(lambda x: go_on() or x)(torch.ones(())),
}


@pytest.mark.parametrize("meanwhile", MEANWHILE.values(), ids=MEANWHILE)
def test_a_reduction_is_not_read_inside_a_mode_or_transform(meanwhile) -> None:
    with ranks() as world:
        started = [rank.reduce_scatter(some(rank.rank, LARGE)) for rank in world]
        meanwhile(lambda: [rank.backend.poll() for rank in world] and None)
        assert all(1 in rank.backend.exchange.in_progress for rank in world)
        assert torch.equal(torch.cat(finish(started)), some(0, LARGE) + some(1, LARGE))


@pytest.mark.parametrize(("size", "phase", "again"), [(2, 0, False), (2, 0, True), (3, 0, True), (3, 1, True)])
def test_ranks_go_on_after_one_was_interrupted_in_a_wait(size, phase, again, monkeypatch) -> None:
    with ranks(size) as world:
        exchange, inputs = world[0].backend.exchange, [some(rank.rank, LARGE) for rank in world]
        started = [rank.all_reduce(x) for rank, x in zip(world, inputs, strict=True)]

        def receive(seconds: float, original: Any = exchange.receive) -> bool:
            if 2 + phase in exchange.contributions:
                raise KeyboardInterrupt
            return original(seconds)

        with monkeypatch.context() as patch:
            patch.setattr(exchange, "receive", receive)
            with pytest.raises(KeyboardInterrupt):
                started[0][0].wait()
        if not again:
            del started[0]
        assert all(torch.equal(out, sum_in_order(inputs)) for out in finish(started))
        for kind in MEANT:
            run_some(world, kind, LARGE)


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
            run_some(world)  # another collective works
        del started
        run_some(world, "reduce_scatter", LARGE)


def go_on_after_errors(mesh: fs.Mesh, shared_memory: bool) -> tuple[list[float], int]:
    """Raise in the middle of backward in some steps; return the losses of the others, and the number of blocks."""
    mesh = fs.init_mesh(mesh.shape, device="cpu", patience=0.2, shared_memory=shared_memory)
    layers = [torch.nn.Linear(150, 150) for _ in range(3)]  # 90 kB: gathered into a shared output
    _, sharded, shards = of_module(mesh, torch.nn.Sequential(*layers), ["0", "1", "2"])
    tried: list[int] = []

    def on_grads(unit: str, grads: dict[str, torch.Tensor]) -> None:
        if tried[-1] % 3 == 2 and unit == "1":
            raise ValueError("no good")

    run_step, losses = fs.value_and_grad(lambda s, x: sharded(s, {}, x).square().mean(), on_grads=on_grads), []
    for step in range(12):
        tried.append(step)
        with contextlib.suppress(ValueError):
            losses.append(run_step(shards, torch.ones(2, 150))[0].item())
    group = mesh.shard
    return losses, group.pool.made + (0 if group.shm is None else group.shm.blocks.made)


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
def test_training_goes_on_after_errors_in_backward_and_uses_memory_again(shared_memory: bool) -> None:
    for losses, made in run_ranks(go_on_after_errors, 2, shared_memory):
        assert losses == losses[:1] * 8
        assert made <= 16  # without reuse more than 70; what raised may wait for the garbage collector
