"""Memory of another rank that cannot be mapped, with its causes; sockets that forked children leave."""

from __future__ import annotations

import errno
import os
import resource
import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from funcshard.comm.shm import transport
from funcshard.comm.shm.exchange import Arrival
from funcshard.comm.shm.transport import Message, Peers, _map_received

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memory files")

PEER: Any = SimpleNamespace(rank=3)


def memory_file(size: int) -> int:
    file = os.memfd_create("funcshard")
    os.ftruncate(file, size)
    return file


@pytest.fixture
def limits() -> Iterator[None]:
    before = {each: resource.getrlimit(each) for each in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)}
    yield
    for each, found in before.items():
        resource.setrlimit(each, found)


def limit(what: int, number: int) -> None:
    resource.setrlimit(what, (number, resource.getrlimit(what)[1]))


def too_large() -> list[int]:
    file = memory_file(1 << 40)
    limit(resource.RLIMIT_AS, 1 << 39)
    return [file]


def no_file_free() -> list[int]:
    file = memory_file(1 << 16)
    limit(resource.RLIMIT_NOFILE, file + 1)
    return [file]


# what is wrong, the files that came, the system's error, and words of cause and remedy
REFUSALS = {
    "no room in memory": (too_large, errno.ENOMEM, "(1,099,511,627,776 bytes) cannot be mapped, because", "ulimit -v"),
    "the file did not come": (list, errno.EMFILE, "has reached its limit of open files", "ulimit -n"),
    "no file is free to open it": (no_file_free, errno.EMFILE, "has reached its limit of open files", "ulimit -n"),
    "an empty file": (lambda: [memory_file(0)], errno.EINVAL, "the system refuses it", "the file is empty"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_the_error_says_why_a_block_cannot_be_mapped(name, limits) -> None:
    files_that_came, code, cause, remedy = REFUSALS[name]
    files = files_that_came()
    with pytest.raises(OSError, match="shared memory of rank 3") as caught:
        _map_received(PEER, files)
    assert caught.value.errno == code
    message = str(caught.value)
    assert cause in message
    assert remedy in message
    assert "pass shared_memory=False to init_mesh" in message
    for file in files:  # they are closed
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


def test_a_system_without_proc_is_said_so(monkeypatch) -> None:
    def refuse(file: int) -> None:
        raise RuntimeError(f"unable to open file </proc/self/fd/{file}> in read-write mode: No such file or directory (2)")

    monkeypatch.setattr(transport, "map_block", refuse)
    with pytest.raises(FileNotFoundError, match=r"/proc, through which it is opened, is not there: mount /proc"):
        _map_received(PEER, [memory_file(4096)])


def test_a_child_that_is_forked_keeps_no_socket_open_and_sends_nothing() -> None:
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(10)
    peers, (until, end) = Peers({1: own}, 1.0), os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(end)
            peers.send(Message(key=7), None, lambda seconds: False)
            came = list(peers.receive(0.0))
            os.read(until, 1)  # the child lives until this process closes the pipe
            os._exit(len(came))
        finally:
            os._exit(100)
    peers.send(Message(key=5), None, lambda seconds: False)
    assert transport._NUMBERS.unpack(theirs.recv(100))[1] == 5
    own.close()  # as when this process is killed
    assert theirs.recv(100) == b""
    os.close(end)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(until)
    theirs.close()


def test_what_came_while_a_rank_was_elsewhere_counts_although_its_wait_is_over() -> None:
    came: list[float] = []
    exchange: Any = SimpleNamespace(
        timeout=0.0, has_arrived=lambda key: bool(came), receive=lambda seconds: came.append(seconds) or True
    )
    Arrival(exchange, 2).wait()
    assert came == [0.0]
