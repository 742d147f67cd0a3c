"""The messages that the ranks of one machine send each other through the sockets of ``rendezvous``.

A message is eight numbers; the first one about a new block of shared memory carries the file of
that block. The sockets keep the bounds of messages (``SOCK_SEQPACKET``), and end with their
process, so a rank that waits for a message finds out that the sender has died.
"""

from __future__ import annotations

import errno
import math
import os
import re
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from funcshard.comm.shm.pool import map_block

_NUMBERS = struct.Struct("<8q")  # whether the block is new, then the fields of ``Message``

IN_OUTPUT = -1  # ``Message.offset`` of a shard that lies at its position in the shared output

# The errors of a socket that has no room now. Every other error means that the peer has gone.
_FULL = {errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS}


class Message(NamedTuple):
    """One rank's message to all other ranks; 0 in a field means that the message does not use it.

    Attributes:
        key: the collective and its phase, see ``exchange``.
        history: a hash of all collectives that the sender has issued up to this one.
        block: number of the block with the sender's contribution.
        offset: first byte of the contribution in that block, or ``IN_OUTPUT``.
        dropped: number of a block that the receiver has to unmap.
        released: a collective that the sender has finished, or minus a shared output.
        also_released: another release.
    """

    key: int = 0
    history: int = 0
    block: int = 0
    offset: int = 0
    dropped: int = 0
    released: int = 0
    also_released: int = 0


class Peer:
    """Another rank, with the messages and blocks received from it.

    Attributes:
        rank: its rank.
        connection: the socket to its process.
        open: whether its process is alive, as far as the socket tells.
        blocks: its blocks that this process has mapped, by number.
        received: its messages about unfinished collectives, by key.
        latest: the highest number of a collective in its messages.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self.open = True
        self.blocks: dict[int, torch.Tensor] = {}
        self.received: dict[int, Message] = {}
        self.latest = 0


class Peers:
    """All other ranks of the group.

    Arguments:
        connections: a socket to every other rank, by rank.
        timeout: seconds after which a rank that reads no messages is an error.
        look: raises if a rank will never read; called again and again after ``patience``.
        patience: seconds after which a rank that reads no messages is looked at.

    Attributes:
        all: every other rank, in order of ranks.
    """

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        timeout: float,
        look: Callable[[], object] = lambda: None,
        patience: float = math.inf,
    ) -> None:
        self.all = [
            Peer(peer_rank, connection) for peer_rank, connection in sorted(connections.items())
        ]
        self._timeout, self._look, self._patience = timeout, look, patience
        self._poll = select.poll()
        self._by_file = {}
        for peer in self.all:
            peer.connection.setblocking(False)
            self._by_file[peer.connection.fileno()] = peer
            self._poll.register(peer.connection, select.POLLIN)
        _ALL.add(self)

    def leave(self) -> None:
        """Close this process's ends of all sockets."""
        for peer in self.all:
            if peer.open and peer.connection.fileno() >= 0:  # else it is closed already
                self._poll.unregister(peer.connection)
            peer.open = False
            peer.connection.close()

    def send(self, message: Message, file: int | None, receive: Callable[[float], bool]) -> None:
        """Send a message to every other rank.

        Arguments:
            message: the message.
            file: the file of the message's block if the block is new.
            receive: handles messages while a rank has no room for this one, and returns whether any
                came.
        """
        message_bytes = _NUMBERS.pack(file is not None, *message)
        for peer in self.all:
            self._send(peer, message_bytes, file, receive)

    def _send(
        self, peer: Peer, data: bytes, file: int | None, receive: Callable[[float], bool]
    ) -> None:
        end_time = next_look = 0.0
        while peer.open:
            try:
                if file is not None:
                    socket.send_fds(peer.connection, [data], [file], socket.MSG_NOSIGNAL)
                else:
                    peer.connection.send(data, socket.MSG_NOSIGNAL)
                return
            except OSError as error:
                # If the peer has gone, a wait for its next message will raise.
                if error.errno not in _FULL:
                    return
                current_time = time.monotonic()
                if not end_time:
                    end_time, next_look = (
                        current_time + self._timeout,
                        current_time + self._patience,
                    )
                if current_time > end_time:
                    raise RuntimeError(
                        f"Timed out waiting {self._timeout:g} s for rank {peer.rank} to read"
                    ) from None
                if current_time > next_look:
                    self._look()
                    next_look = current_time + self._patience / 8
                # Why receive here: the peer has hundreds of messages to read, and may itself be
                # waiting until this rank reads.
                if not receive(0.01):
                    time.sleep(0.001)

    def receive(self, seconds: float) -> Iterable[tuple[Peer, Message | None]]:
        """Receive a message from each peer that has sent one; wait up to ``seconds`` for the first.

        Yields:
            Each sender with its message; ``None`` if it has gone, or there was nothing to read
            after all.
        """
        for file, _ in self._poll.poll(seconds * 1000):
            peer = self._by_file[file]
            try:
                message_bytes, received_files, _, _ = socket.recv_fds(
                    peer.connection, _NUMBERS.size, 1, socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, ConnectionResetError):
                # A reset means that the peer ended with unread messages. Its own messages can still
                # be read by the next calls.
                yield peer, None
                continue
            except OSError:
                message_bytes, received_files = b"", []
            if not message_bytes:
                peer.open = False
                self._poll.unregister(peer.connection)
                yield peer, None
                continue
            is_new, *numbers = _NUMBERS.unpack(message_bytes)
            message = Message(*numbers)
            peer.blocks.pop(message.dropped, None)
            if is_new:
                peer.blocks[message.block] = _map_received(peer, received_files)
            yield peer, message


_ALL: weakref.WeakSet[Peers] = weakref.WeakSet()  # those of this process, for its forked children


def _leave_in_child() -> None:
    # Why: a forked child would keep the sockets open, and its messages would mix with the rank's.
    for peers in list(_ALL):
        peers.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)


# Why a block cannot be mapped, and the remedy, by the system's error.
_NO_FILES = (
    "this process, or the machine, has reached its limit of open files",
    "raise the limit (ulimit -n)",
)
_REFUSALS = {
    errno.EMFILE: _NO_FILES,
    errno.ENFILE: _NO_FILES,
    errno.ENOMEM: (
        "this process has no room for it in memory or in its address space",
        (
            "raise the limit of address space (ulimit -v) or of mappings (sysctl "
            "vm.max_map_count), or run fewer ranks"
        ),
    ),
    errno.ENOENT: (
        "/proc, through which it is opened, is not there",
        "mount /proc in the container",
    ),
    errno.EACCES: (
        "the system does not let this process open it",
        "allow the ranks to open each other's memory files",
    ),
}
_UNKNOWN = ("the system refuses it", "look at the error of the system")


def _map_received(peer: Peer, files: list[int]) -> torch.Tensor:
    size_text = ""
    try:
        if not files:  # the system drops a file for which the process has no room
            raise OSError(errno.EMFILE, "the file did not come with its message")
        file_size = os.fstat(files[0]).st_size
        size_text = f" ({file_size:,} bytes)"
        if not file_size:
            raise OSError(errno.EINVAL, "the file is empty")
        return map_block(files[0])
    except (OSError, RuntimeError) as error:
        error_code = _code_of(error)
        cause, remedy = _REFUSALS.get(error_code, _UNKNOWN)
        raise OSError(
            error_code,
            f"the shared memory of rank {peer.rank}{size_text} cannot be mapped, because {cause}: "
            f"{remedy}, or pass shared_memory=False to init_mesh; the system says: {error}",
        ) from error
    finally:
        for received_file in files:
            os.close(received_file)


def _code_of(error: OSError | RuntimeError) -> int:
    """Return the number of the system's error, which torch tells at the end of its message."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    code_match = re.search(r"\((\d+)\)$", str(error).splitlines()[0])
    return int(code_match[1]) if code_match else errno.EIO
