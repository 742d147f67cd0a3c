"""Sockets between the processes of one machine: where the ranks of a group all run on one, each gets one to every other.

What ranks of one machine tell each other: a few numbers at a time, some with the file of a new piece of memory.

A message says where its sender's part of a collective lies, what its sender has issued up to it, and what its sender has
done with. It goes to every other rank, over a socket that keeps the bounds of messages and ends with its process.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from funcshard.comm.shm.pool import mapped

__all__ = ["IN_PLACE", "Message", "Peer", "Peers", "close", "connect"]

_RANK = struct.Struct("<q")


_SECONDS = 60.0  # for what a process that has answered a moment ago still has to do


def connect(rank: int, size: int, texts: Callable[[str], list[str]], *, wanted: bool = True) -> dict[int, socket.socket]:
    """Connect every pair of ranks; every rank has to call this; ``close`` is the inverse.

    Arguments:
        rank: this process's rank.
        size: number of ranks.
        texts: gives every rank's text, in order of ranks.
        wanted: whether this rank wants to be connected.

    Returns:
        A socket to each other rank, which keeps the bounds of messages and ends with its process. None at all, on every
        rank, if the ranks are not all on one machine, one does not want to, or the system does not let them.
    """
    listener, place, name = None, _place() if wanted else "", f"funcshard-{secrets.token_hex(16)}"
    if place:
        listener = _listener(name, size)
        place = place if listener is not None else ""
    found: dict[int, socket.socket] = {}
    try:
        answers = [json.loads(text) for text in texts(json.dumps([place, name]))]
        if listener is None or any(other != place for other, _ in answers):
            return {}
        # a connection stands once it is in the listener's queue, so that nobody waits for anybody here
        reached = True
        for other in range(rank):
            try:
                found[other] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                found[other].settimeout(_SECONDS)
                found[other].connect(f"\0{answers[other][1]}")
                found[other].send(_RANK.pack(rank))
            except OSError:
                reached = False
        if not all(json.loads(text) for text in texts(json.dumps(reached))):
            close(found)
            return {}
        listener.settimeout(_SECONDS)
        while len(found) < size - 1:
            other_end, _ = listener.accept()
            if _user(other_end) != os.getuid():
                other_end.close()
                continue
            other_end.settimeout(_SECONDS)
            (other,) = _RANK.unpack(other_end.recv(_RANK.size))
            found[other] = other_end
    except BaseException:
        close(found)
        raise
    finally:
        if listener is not None:
            listener.close()
    return found


def close(sockets: Mapping[int, socket.socket]) -> None:
    """Close what ``connect`` gave; ``connect`` is the inverse."""
    for each in sockets.values():
        each.close()


def _place() -> str:
    """What processes have in common that can reach each other's abstract addresses; ``""`` where there are none."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return ""
    import resource  # Unix only

    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return ""  # files in memory are files too, and one too large would fail on one rank in the middle of a collective
    try:
        os.close(os.memfd_create("funcshard"))
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "user")]
        return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces, str(os.getuid())])
    except OSError:
        return ""


def _listener(name: str, size: int) -> socket.socket | None:
    """Where the others can connect; ``None`` where the system does not let us."""
    listener = None
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0{name}")  # an address in the abstract namespace, which leaves no file behind
        listener.listen(size)
    except OSError:
        if listener is not None:
            listener.close()
        return None
    return listener


def _user(other_end: socket.socket) -> int:
    _, user, _ = struct.unpack("3i", other_end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)


_NUMBERS = struct.Struct("<8q")


IN_PLACE = -1  # where a part lies that its sender has put where it belongs


# What the system says when it has no room for a message just now; anything else means that there is nobody to read it.
_FULL = {errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS}


class Message(NamedTuple):
    """What one rank tells all the others.

    Attributes:
        key: what it is about; 0 for no collective.
        history: a hash of all that its sender has issued up to that.
        piece: number of the piece of memory that its sender's part is in; 0 for none.
        at: byte where the part begins, or ``IN_PLACE``.
        replaced: number of a piece that there is no more; 0 for none.
        done: what its sender has done with; 0 for nothing.
        done_too: another such.
    """

    key: int = 0
    history: int = 0
    piece: int = 0
    at: int = 0
    replaced: int = 0
    done: int = 0
    done_too: int = 0


class Peer:
    """Another rank, and what it has said.

    Attributes:
        rank: which.
        connection: the socket to it.
        open: whether its process is there.
        pieces: its pieces of memory, by number.
        said: its messages about collectives that are not over here, by key.
        latest: the highest number of a collective that it has spoken of.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self.open = True
        self.pieces: dict[int, torch.Tensor] = {}
        self.said: dict[int, Message] = {}
        self.latest = 0


class Peers:
    """The other ranks.

    Arguments:
        connections: a socket to every other rank.
        timeout: seconds after which a rank that reads nothing is an error.
    """

    def __init__(self, connections: Mapping[int, socket.socket], timeout: float) -> None:
        self.all = [Peer(other, connection) for other, connection in sorted(connections.items())]
        self._timeout = timeout
        self._poll = select.poll()
        self._by_file = {}
        for peer in self.all:
            peer.connection.setblocking(False)
            self._by_file[peer.connection.fileno()] = peer
            self._poll.register(peer.connection, select.POLLIN)

    def send(self, message: Message, file: int | None, meanwhile: Callable[[float], bool]) -> None:
        """Send every rank a message, with the file of its piece if that is new.

        Where a rank has no room for it, ``meanwhile(seconds)`` takes what has come, and returns whether anything has.
        """
        data = _NUMBERS.pack(file is not None, *message)
        for peer in self.all:
            self._send(peer, data, file, meanwhile)

    def _send(self, peer: Peer, data: bytes, file: int | None, meanwhile: Callable[[float], bool]) -> None:
        end = time.monotonic() + self._timeout
        while peer.open:
            try:
                if file is not None:
                    socket.send_fds(peer.connection, [data], [file], socket.MSG_NOSIGNAL)
                else:
                    peer.connection.send(data, socket.MSG_NOSIGNAL)
                return
            except OSError as error:
                if error.errno not in _FULL:  # it is gone, which the wait for its message will find
                    return
                if time.monotonic() > end:
                    raise RuntimeError(f"Timed out waiting {self._timeout:g} s for rank {peer.rank} to read") from None
                # it has hundreds of messages to read; those to us may be what it waits for
                if not meanwhile(0.01):
                    time.sleep(0.001)

    def receive(self, seconds: float) -> Iterable[tuple[Peer, Message | None]]:
        """Take a message of each rank that has sent one, waiting at most so long for the first.

        Yields:
            Each of them, with its sender; ``None`` where that has gone, or there was none after all.
        """
        for file, _ in self._poll.poll(seconds * 1000):
            peer = self._by_file[file]
            try:
                data, files, _, _ = socket.recv_fds(peer.connection, _NUMBERS.size, 1, socket.MSG_CMSG_CLOEXEC)
            except (BlockingIOError, ConnectionResetError):  # reset: it went without reading all; what it said is here
                yield peer, None
                continue
            except OSError:
                data, files = b"", []
            if not data:
                peer.open = False
                self._poll.unregister(peer.connection)
                yield peer, None
                continue
            new, *numbers = _NUMBERS.unpack(data)
            message = Message(*numbers)
            peer.pieces.pop(message.replaced, None)
            if new:
                peer.pieces[message.piece] = _opened(peer, files)
            yield peer, message


def _opened(peer: Peer, files: list[int]) -> torch.Tensor:
    try:
        return mapped(files[0])
    except (IndexError, RuntimeError) as error:  # it did not come, or cannot be opened
        raise OSError(
            errno.EMFILE,
            f"the memory of rank {peer.rank} cannot be opened, as where this process has as many open files as it may: "
            f"raise that limit (ulimit -n), or use init_mesh(shared_memory=False)",
        ) from error
    finally:
        for each in files:
            os.close(each)
