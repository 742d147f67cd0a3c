"""Memory of another rank that cannot be mapped; sockets that forked children leave; late messages."""

from __future__ import annotations

import os
import resource
import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from funcshard.comm import DesyncDetector
from funcshard.comm.shm import exchange as exchanges
from funcshard.comm.shm.exchange import Exchange, _map_received

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memory files")

PEER: Any = SimpleNamespace(rank=3)


def too_large() -> list[int]:
    file = os.memfd_create("funcshard")
    os.ftruncate(file, 1 << 40)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 39, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return [file]


# what is wrong, the files that came, and words of the error
REFUSALS = {
    "no room in memory": (too_large, "(1,099,511,627,776 bytes) cannot be mapped; the system says: "),
    "the file did not come": (list, "the file did not come with its message"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_the_error_says_why_a_block_cannot_be_mapped(name) -> None:
    files_that_came, words = REFUSALS[name]
    limit = resource.getrlimit(resource.RLIMIT_AS)
    try:
        files = files_that_came()
        with pytest.raises(OSError, match="shared memory of rank 3") as caught:
            _map_received(PEER, files)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert words in str(caught.value)
    assert "Raise ulimit -n, ulimit -v or" in str(caught.value)
    assert "pass shared_memory=False to init_mesh" in str(caught.value)
    for file in files:  # they are closed
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


def test_a_child_that_is_forked_keeps_no_socket_open_and_sends_nothing() -> None:
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(10)
    exchange, (until, end) = Exchange(0, {1: own}, DesyncDetector("shard", [0, 1], 0), 1.0), os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(end)
            exchange.announce(7)
            came = exchange.receive(0.0)
            os.read(until, 1)  # the child lives until this process closes the pipe
            os._exit(came)
        finally:
            os._exit(100)
    exchange.announce(5)
    assert exchanges._NUMBERS.unpack(theirs.recv(100))[1] == 5
    own.close()  # as when this process is killed
    assert theirs.recv(100) == b""
    os.close(end)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(until)
    theirs.close()


def test_what_came_while_a_rank_was_elsewhere_counts_although_its_wait_is_over() -> None:
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    exchange = Exchange(0, {1: own}, DesyncDetector("shard", [0, 1], 0), 0.0)
    theirs.send(exchanges._NUMBERS.pack(0, exchange.begin(1), 0, 0, 0, 0, 0, 0))
    exchange.wait_for(2)
    with pytest.raises(RuntimeError, match="Timed out waiting 0 s for the ranks of one machine"):
        exchange._have_announced(exchange.begin(2), 5.0)
    theirs.close()
