"""The rendezvous of processes on one machine. Most ranks here are threads, which exchange texts at a barrier."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.comm.shm import transport
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract addresses are Linux's")


def as_threads(size: int, run: Callable[[int, Callable[[str], list[str]]], Any]) -> list[Any]:
    """Run ``run(rank, texts)`` as every rank; an error is a result too."""
    barrier, sent, results = threading.Barrier(size), [""] * size, [None] * size

    def texts(rank: int, text: str) -> list[str]:
        barrier.wait(10)
        sent[rank] = text
        barrier.wait(10)
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
        thread.join(20)
    return results


def connect_all(size: int, unwilling: int = -1) -> list[dict[int, socket.socket]]:
    return as_threads(size, lambda rank, texts: transport.connect(rank, size, texts, wanted=rank != unwilling))


def rank_here() -> int:
    return int(threading.current_thread().name.split()[1])


def open_files() -> int:
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
        transport.close(each)
    # a socket ends with the one that it is connected to
    assert all(connection.recv(100) == b"" for connection in found[0].values())
    transport.close(found[0])
    assert open_files() == before


def on_rank(rank: int, run: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    return run() if rank_here() == rank else otherwise()


def refuse(*_: Any) -> Any:
    raise OSError(errno.EPERM, "not allowed here")


# why rank 1 cannot be connected, and the patch that makes it so
REFUSALS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "it runs on another machine": lambda patch: patch.setattr(
        transport, "_machine", lambda machine=transport._machine: on_rank(1, lambda: "another", machine)
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

    patch.setattr(transport.socket, "socket", type("Socket", (socket.socket,), {name: method}))


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

        return transport.connect(rank, 2, fail_at_the_second)

    assert [str(error) for error in as_threads(2, run)] == ["the peers are gone"] * 2
    assert open_files() == before


def test_processes_of_other_users_are_not_connected(monkeypatch) -> None:
    own = transport._machine()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert transport._machine() not in (own, "")


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
    assert transport._machine() != ""
    monkeypatch.setattr("resource.getrlimit", lambda _: (20_000, -1))
    assert transport._machine() == ""
