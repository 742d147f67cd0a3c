"""What ranks of one machine tell each other: a few numbers at a time, some with the file of a new piece of memory.

A message says where its sender's part of a collective lies, what its sender has issued up to it, and what its sender has
done with. It goes to every other rank, over a socket that keeps the bounds of messages and ends with its process.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from funcshard.memory import mapped

__all__ = ["IN_PLACE", "Message", "Peer", "Peers"]

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
