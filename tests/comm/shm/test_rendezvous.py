"""The rendezvous of processes on one machine, also among strangers.

Most ranks here are threads, which exchange texts at a barrier.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.comm.shm import rendezvous
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract addresses are Linux's")


def as_threads(size: int, run: Callable[[int, Callable[[str], list[str]]], Any]) -> list[Any]:
    """Run ``run(rank, texts)`` as every rank; an error is a result too."""
    barrier, sent, results = threading.Barrier(size), [""] * size, [None] * size

    def texts(rank: int, text: str) -> list[str]:
        barrier.wait(60)
        sent[rank] = text
        barrier.wait(60)
        return list(sent)

    def main(rank: int) -> None:
        try:
            results[rank] = run(rank, lambda text: texts(rank, text))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=main, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


def connect_all(size: int, unwilling: int = -1) -> list[dict[int, socket.socket]]:
    return as_threads(size, lambda rank, texts: rendezvous.connect(rank, size, texts, wanted=rank != unwilling))


def rank_here() -> int:
    return int(threading.current_thread().name.split()[1])


def open_files() -> int:
    gc.collect()  # else the garbage of an earlier test may close some between two counts
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_pair_of_ranks_is_connected_and_bounds_of_messages_are_kept(size) -> None:
    before = open_files()
    found = connect_all(size)
    assert [sorted(each) for each in found] == [[other for other in range(size) if other != rank] for rank in range(size)]
    for rank, each in enumerate(found):
        for other, connection in each.items():
            connection.send(b"first")
            connection.send(f"from {rank} to {other}".encode())
    for rank, each in enumerate(found):
        for other, connection in each.items():
            assert connection.recv(100) == b"first"
            assert connection.recv(100) == f"from {other} to {rank}".encode()
    for each in found[1:]:
        rendezvous.close(each)
    # a socket ends with the one that it is connected to
    assert all(connection.recv(100) == b"" for connection in found[0].values())
    rendezvous.close(found[0])
    assert open_files() == before


def on_rank(rank: int, run: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    return run() if rank_here() == rank else otherwise()


def refuse(*_: Any) -> Any:
    raise OSError(errno.EPERM, "not allowed here")


# why rank 1 cannot be connected, and the patch that makes it so
REFUSALS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "it runs on another machine": lambda patch: patch.setattr(
        rendezvous, "_machine", lambda machine=rendezvous._machine: on_rank(1, lambda: "another", machine)
    ),
    "its system has no memory files": lambda patch: patch.setattr(
        os, "memfd_create", lambda name, make=os.memfd_create: on_rank(1, refuse, lambda: make(name))
    ),
    "it cannot read its namespaces": lambda patch: patch.setattr(
        os, "readlink", lambda path, read=os.readlink: on_rank(1, refuse, lambda: read(path))
    ),
    "it cannot listen": lambda patch: refusing_socket(patch, "listen"),
    "it cannot connect": lambda patch: refusing_socket(patch, "connect"),
    "it has reached its limit of open files": lambda patch: refusing_socket(patch, "__new__"),
}


def refusing_socket(patch: pytest.MonkeyPatch, name: str) -> None:
    original = getattr(socket.socket, name)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        return on_rank(1, refuse, lambda: original(self, *args, **options))

    patch.setattr(rendezvous.socket, "socket", type("Socket", (socket.socket,), {name: method}))


@pytest.mark.parametrize("name", REFUSALS)
def test_no_rank_is_connected_if_one_cannot_be(name, monkeypatch) -> None:
    before = open_files()
    REFUSALS[name](monkeypatch)
    assert connect_all(3) == [{}] * 3
    assert open_files() == before


def test_no_rank_is_connected_if_one_does_not_want_to_be() -> None:
    before = open_files()
    assert connect_all(3, unwilling=2) == [{}] * 3
    assert open_files() == before


def test_a_rank_that_fails_to_exchange_texts_leaves_nothing_open() -> None:
    before = open_files()

    def run(rank: int, texts: Callable[[str], list[str]]) -> Any:
        sent = []

        def fail_at_the_second(text: str) -> list[str]:
            sent.append(text)
            if len(sent) == 2:
                raise RuntimeError("the peers are gone")
            return texts(text)

        return rendezvous.connect(rank, 2, fail_at_the_second)

    assert [str(error) for error in as_threads(2, run)] == ["the peers are gone"] * 2
    assert open_files() == before


# --- strangers ------------------------------------------------------------------------------------


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
    return rendezvous._HELLO.pack(rank, bytes(rendezvous._NUMBER))


def who_leaves_at_once(address: str) -> list[socket.socket]:
    call(address).close()
    return []


def who_repeats_the_proof_that_it_gets(address: str) -> list[socket.socket]:
    connection = call(address)
    connection.send(introduced(1))

    def repeat() -> None:
        with contextlib.suppress(OSError):
            connection.send(connection.recv(100)[rendezvous._NUMBER :])

    threading.Thread(target=repeat, daemon=True).start()
    return [connection]


def who_are_many(address: str) -> list[socket.socket]:
    return [call(address) for _ in range(2 * rendezvous._MOST_CALLS)]


# what a process that is no rank does with the address of rank 0
STRANGERS: dict[str, Callable[[str], list[socket.socket]]] = {
    "is silent": saying(),
    "leaves at once": who_leaves_at_once,
    "sends nothing but an end": saying(b""),
    "sends too little": saying(b"x"),
    "sends half an introduction": saying(introduced(1)[:12]),
    "sends too much": saying(introduced(1) * 3),
    "sends anything": saying(bytes(range(24))),
    "calls itself rank 1": saying(introduced(1)),
    "calls itself rank 0": saying(introduced(0)),
    "calls itself a rank that there is not": saying(introduced(3)),
    "guesses a proof": saying(introduced(1), bytes(rendezvous._HASH)),
    "repeats the proof that it gets": who_repeats_the_proof_that_it_gets,
    "is many": who_are_many,
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_hung_up_and_keeps_no_rank_from_being_connected(name) -> None:
    before, strangers = open_files(), []

    def run(rank: int, texts: Callable[[str], list[str]]) -> dict[int, socket.socket]:
        sent = []

        def with_a_stranger(text: str) -> list[str]:
            sent.append(text)
            if len(sent) == 1 and rank == 0:  # before any rank can call
                strangers.extend(STRANGERS[name](json.loads(text)[1]))
            return texts(text)

        return rendezvous.connect(rank, 3, with_a_stranger)

    start = time.monotonic()
    found = as_threads(3, run)
    assert time.monotonic() - start < rendezvous._TIMEOUT / 2
    assert [sorted(each) for each in found] == [[1, 2], [0, 2], [0, 1]]
    for low, high in ((0, 1), (0, 2), (1, 2)):
        found[low][high].send(b"a message")
        assert found[high][low].recv(100) == b"a message"
    for stranger in strangers:
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionError):  # hung up with messages unread
            while answer := stranger.recv(100):
                assert answer != rendezvous._WELCOME
        stranger.close()
    for each in found:
        rendezvous.close(each)
    assert open_files() == before


@pytest.mark.slow
def test_a_rank_with_another_secret_is_no_rank(monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "_TIMEOUT", 0.5)
    before = open_files()

    def run(rank: int, texts: Callable[[str], list[str]]) -> Any:
        def falsified(text: str) -> list[str]:
            answers = [json.loads(each) for each in texts(text)]
            if rank == 1 and isinstance(answers[0], list):
                answers[0][2] = "00" * rendezvous._HASH
            return [json.dumps(each) for each in answers]

        return rendezvous.connect(rank, 2, falsified)

    assert as_threads(2, run) == [{}, {}]
    assert open_files() == before


def test_a_rank_that_is_hung_up_calls_again(monkeypatch) -> None:
    accept, hung_up = rendezvous._Meeting._accept, []

    def accept_and_hang_up(self: Any) -> None:
        accept(self)
        if self._rank == 0 and not hung_up:
            hung_up.append(self._hang_up_one())

    monkeypatch.setattr(rendezvous._Meeting, "_accept", accept_and_hang_up)
    found = connect_all(2)
    assert hung_up == [True]
    assert [sorted(each) for each in found] == [[1], [0]]
    for each in found:
        rendezvous.close(each)


def test_processes_of_other_users_are_not_connected(monkeypatch) -> None:
    own = rendezvous._machine()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert rendezvous._machine() not in (own, "")


def test_processes_that_were_started_by_another_user_are_connected(monkeypatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # the system tells the peer the effective user
    found = connect_all(2)
    assert [sorted(each) for each in found] == [[1], [0]]
    for each in found:
        rendezvous.close(each)


def carriers_with_one_unwilling(mesh: fs.Mesh, unwilling: int) -> tuple[list[str], float]:
    mesh = fs.init_mesh(device="cpu", shared_memory=mesh.rank != unwilling)
    grid = mesh.reshaped({"replicate": 2, "shard": 2})
    carriers = [type(group._carrier).__name__ for group in (mesh.shard, grid.shard, grid.replicate)]
    return carriers, fs.psum(torch.tensor(float(mesh.rank)), mesh).item() + fs.psum(torch.tensor(1.0), grid).item()


@pytest.mark.parametrize("unwilling", [-1, 3])
def test_a_rank_that_wants_no_shared_memory_makes_its_groups_use_gloo(unwilling) -> None:
    other = "SharedMemoryBackend" if unwilling == -1 else "Gloo"
    for rank, (carriers, total) in enumerate(run_ranks(carriers_with_one_unwilling, 4, unwilling)):
        # rank 3 shares its row of the grid with rank 2, and its column with rank 1
        assert carriers == [
            other,
            other if rank in (2, 3) else "SharedMemoryBackend",
            other if rank in (1, 3) else "SharedMemoryBackend",
        ]
        assert total == 10


def test_a_limit_to_the_size_of_files_rules_out_shared_memory(monkeypatch) -> None:
    assert rendezvous._machine() != ""
    monkeypatch.setattr("resource.getrlimit", lambda _: (20_000, -1))
    assert rendezvous._machine() == ""
