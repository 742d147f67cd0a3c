"""The rendezvous of processes on one machine, also among strangers.

Most ranks here are threads, which exchange texts at a barrier.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.comm.shm import rendezvous
from tests.comm.shm.leftovers import open_files
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract addresses are Linux's")

Texts = Callable[[str], list[str]]


def connect_all(
    size: int,
    change: Callable[[int, int, Texts, str], list[str]] = lambda rank, step, texts, text: texts(text),
    **options: Any,
) -> list[Any]:
    """Connect all ranks, each as a thread, rank 1 with ``options``; an error is a result too.

    ``change(rank, step, texts, text)`` exchanges the text of each step in place of ``texts(text)``.
    """
    barrier, sent, results = threading.Barrier(size), [""] * size, [None] * size

    def main(rank: int) -> None:
        steps = itertools.count()

        def exchange(text: str) -> list[str]:
            barrier.wait(60)
            sent[rank] = text
            barrier.wait(60)
            return list(sent)

        try:
            texts = lambda text: change(rank, next(steps), exchange, text)  # noqa: E731
            results[rank] = rendezvous.connect(rank, size, texts, **(options if rank == 1 else {}))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=main, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


def check_and_close(found: list[dict[int, socket.socket]]) -> None:
    """Check that every pair of ranks is connected, and that bounds of messages are kept; close all."""
    ranks = range(len(found))
    assert [sorted(sockets) for sockets in found] == [[other for other in ranks if other != rank] for rank in ranks]
    for rank, other in itertools.permutations(ranks, 2):
        for message in (b"first", f"from {rank} to {other}".encode()):
            found[rank][other].send(message)
    for rank, other in itertools.permutations(ranks, 2):
        assert [found[rank][other].recv(100) for _ in range(2)] == [b"first", f"from {other} to {rank}".encode()]
    for sockets in found[1:]:
        rendezvous.close(sockets)
    # a socket ends with the one that it is connected to
    assert all(connection.recv(100) == b"" for connection in found[0].values())
    rendezvous.close(found[0])


@pytest.fixture
def _closed() -> Iterator[None]:
    """Check that a test leaves no file open."""
    before = open_files()
    yield
    assert open_files() == before


leaves_nothing = pytest.mark.usefixtures("_closed")


@leaves_nothing
def test_every_pair_of_ranks_is_connected_and_bounds_of_messages_are_kept() -> None:
    for size in (1, 2, 5):
        check_and_close(connect_all(size))


def on_rank_1(run: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    return run() if threading.current_thread().name == "rank 1" else otherwise()


def refuse(*_: Any) -> Any:
    raise OSError(errno.EPERM, "not allowed here")


def refusing_socket(patch: pytest.MonkeyPatch, name: str) -> None:
    original = getattr(socket.socket, name)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        return on_rank_1(refuse, lambda: original(self, *args, **options))

    patch.setattr(rendezvous.socket, "socket", type("Socket", (socket.socket,), {name: method}))


# why rank 1 cannot be connected, and the patch that makes it so
REFUSALS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "it runs on another machine": lambda patch: patch.setattr(
        rendezvous, "_machine", lambda machine=rendezvous._machine: on_rank_1(lambda: "another", machine)
    ),
    "its system has no memory files": lambda patch: patch.setattr(
        os, "memfd_create", lambda name, make=os.memfd_create: on_rank_1(refuse, lambda: make(name))
    ),
    "it cannot read its namespaces": lambda patch: patch.setattr(
        os, "readlink", lambda path, read=os.readlink: on_rank_1(refuse, lambda: read(path))
    ),
    "it cannot listen": lambda patch: refusing_socket(patch, "listen"),
    "it cannot connect": lambda patch: refusing_socket(patch, "connect"),
    "it has reached its limit of open files": lambda patch: refusing_socket(patch, "__new__"),
}


@leaves_nothing
def test_no_rank_is_connected_if_one_cannot_be(monkeypatch) -> None:
    assert connect_all(3, wanted=False) == [{}] * 3
    for reason, refuse in REFUSALS.items():
        with monkeypatch.context() as patch:
            refuse(patch)
            assert connect_all(3) == [{}] * 3, reason


@leaves_nothing
def test_a_rank_that_fails_to_exchange_texts_leaves_nothing_open() -> None:
    def fail_at_the_second(rank: int, step: int, texts: Texts, text: str) -> list[str]:
        if step == 1:
            raise RuntimeError("the peers are gone")
        return texts(text)

    assert [str(error) for error in connect_all(2, fail_at_the_second)] == ["the peers are gone"] * 2


def call(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(5)
    connection.connect(f"\0{address}")
    return connection


def saying(*messages: bytes) -> Callable[[str], list[socket.socket]]:
    def stranger(address: str) -> list[socket.socket]:
        connection = call(address)
        for message in messages:
            connection.send(message)
        return [connection]

    return stranger


def introduced(rank: int) -> bytes:
    return rendezvous._hello(rank, "00" * rendezvous._TOKEN)


def who_leaves_at_once(address: str) -> list[socket.socket]:
    call(address).close()
    return []


# what a process that is no rank does with the address of rank 0
STRANGERS: dict[str, Callable[[str], list[socket.socket]]] = {
    "is silent": saying(),
    "leaves at once": who_leaves_at_once,
    "sends too much": saying(introduced(1) * 3),
    "calls itself rank 1": saying(introduced(1)),
    "guesses twice": saying(introduced(1), bytes(rendezvous._TOKEN)),
    "is many": lambda address: [call(address) for _ in range(256)],
}


def bringing(make: Callable[[str], list[socket.socket]], strangers: list[socket.socket]) -> Any:
    """Return an exchange before which strangers call rank 0, before any rank can."""

    def change(rank: int, step: int, texts: Texts, text: str) -> list[str]:
        if step == rank == 0:
            strangers.extend(make(json.loads(text)[1]))
        return texts(text)

    return change


@leaves_nothing
def test_a_stranger_is_hung_up_and_keeps_no_rank_from_being_connected() -> None:
    for name, make in STRANGERS.items():
        start, strangers = time.monotonic(), []
        found = connect_all(3, bringing(make, strangers))
        assert time.monotonic() - start < 10, name
        check_and_close(found)
        for stranger in strangers:
            with contextlib.suppress(ConnectionError):  # hung up with messages unread
                assert stranger.recv(100) == b"", name
            stranger.close()


@leaves_nothing
def test_a_queue_that_strangers_have_filled_makes_all_ranks_use_gloo(monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "_QUEUE", 0)
    strangers: list[socket.socket] = []
    assert connect_all(2, bringing(lambda address: [call(address) for _ in range(3)], strangers)) == [{}, {}]
    for stranger in strangers:
        stranger.close()


def test_processes_of_one_effective_user_are_connected_and_those_of_others_are_not(monkeypatch) -> None:
    own = rendezvous._machine()
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # the system tells the peer the effective user
    check_and_close(connect_all(2))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert rendezvous._machine() not in (own, "")


def test_a_limit_to_the_size_of_files_rules_out_shared_memory(monkeypatch) -> None:
    assert rendezvous._machine() != ""
    monkeypatch.setattr("resource.getrlimit", lambda _: (20_000, -1))
    assert rendezvous._machine() == ""


def carriers_with_one_unwilling(mesh: fs.Mesh, unwilling: int) -> tuple[list[str], float]:
    mesh = fs.init_mesh(device="cpu", shared_memory=mesh.rank != unwilling)
    grid = mesh.reshaped({"replicate": 2, "shard": 2})
    carriers = [type(group.shm or group.backend).__name__ for group in (mesh.shard, grid.shard, grid.replicate)]
    return carriers, fs.psum(torch.tensor(float(mesh.rank)), mesh).item() + fs.psum(torch.tensor(1.0), grid).item()


def test_a_rank_that_wants_no_shared_memory_makes_its_groups_use_gloo() -> None:
    for rank, answer in enumerate(run_ranks(carriers_with_one_unwilling, 4, 3)):
        # rank 3 shares its row of the grid with rank 2, and its column with rank 1
        on_gloo = [rank in ranks for ranks in (range(4), (2, 3), (1, 3))]
        assert answer == (["Gloo" if gloo else "SharedMemoryBackend" for gloo in on_gloo], 10)
