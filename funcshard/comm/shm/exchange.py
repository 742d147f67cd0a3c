"""The protocol by which the ranks of one machine exchange data through shared memory.

On each rank the ``DesyncDetector`` counts collectives from 1, and keeps a hash of their history.
One collective takes five steps:

1. **Write.** Each rank copies its contribution into a block of its shared memory.
2. **Announce.** The rank sends a message to each of its peers, with the collective, the rank's
   history, the block, and the offset of the contribution in it. The first message about a block
   carries its file, which each peer maps.
3. **Compute.** The caller continues.
4. **Read.** When the caller waits, the rank receives messages until every peer has announced its
   contribution. It compares their histories with its own, before it reads wrong data, and reads the
   contributions where they lie, in the blocks of its peers.
5. **Release.** The rank's next messages name the collectives that it has finished. A rank uses the
   memory of a contribution again once every rank, itself included, has released the collective.
   There is no barrier.

A large all-reduce has a second **phase**, in which each rank contributes the part that it has
summed. Each phase has its own messages, under the **key** ``2 * number + phase``.

**Shared outputs.** ``all_gather_shared`` puts the gathered buffer in memory once for all ranks,
into an output block of rank 0. Each rank writes its shard there, and announces ``IN_OUTPUT``
instead of an offset. A rank that is ahead of rank 0 does not know the output block yet. It
contributes its shard as in steps 1 and 2, and when it waits, it copies the shard into the output
block and announces ``IN_OUTPUT``. A rank that wants to read before that copies the missing shard
itself: two ranks may write the same bytes to the same position, which does no harm. The output
block outlives the collective: a rank releases it, under minus the collective's number, when its
last tensor in it is gone. Only rank 0 counts these releases.

**A collective that is not waited for**, as after an exception, is finished without reading once its
``Work`` is gone.

**A message** is eight numbers; the first one about a new block carries its file. The sockets keep
the bounds of messages (``SOCK_SEQPACKET``).

**When a process dies**, the system closes its sockets. Its peers still read what it announced
before, and raise when they wait for its next contribution.
"""

from __future__ import annotations

import errno
import functools
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from funcshard.comm import DesyncDetector
from funcshard.comm.shm.pool import SLAB_BYTES, Block, SharedBlocks, map_block
from funcshard.comm.shm.rendezvous import close

_NUMBERS = struct.Struct("<8q")  # whether the block is new, then the fields of ``Message``

IN_OUTPUT = (
    -1
)  # ``Message.offset`` of a shard that lies at its position in the shared output

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


@dataclass(slots=True, eq=False)
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

    rank: int
    connection: socket.socket
    open: bool = True
    blocks: dict[int, torch.Tensor] = field(default_factory=dict)
    received: dict[int, Message] = field(default_factory=dict)
    latest: int = 0


class Exchange:
    """One rank's contributions to the collectives of one group, its messages and its releases.

    Arguments:
        rank: this process's rank.
        connections: a socket to each peer, closed when the exchange is gone.
        desync: the desync detector of the group.
        timeout: seconds after which a rank has to have joined a collective.

    Attributes:
        rank, desync, timeout: as given.
        size: number of ranks.
        peers: all other ranks, in their order, and their messages.
        blocks: the shared memory of this rank.
        in_progress: history of each collective that this rank has not finished, by number.
        contributions: block and offset of this rank's contributions, by key, and of rank 0's output
            blocks, by minus the number.
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        desync: DesyncDetector,
        timeout: float,
    ) -> None:
        self.rank, self.size = rank, len(connections) + 1
        self.desync, self.timeout = desync, timeout
        self.peers = [
            Peer(peer, connection) for peer, connection in sorted(connections.items())
        ]
        self.blocks = SharedBlocks()
        self.in_progress: dict[int, int] = {}
        self.contributions: dict[int, tuple[Block, int]] = {}
        self._ends: dict[int, float] = {}  # when the time of each of these is over
        self._latest = 0  # highest number of a collective that this rank has begun
        self._unannounced: list[
            int
        ] = []  # this rank's releases that no message has named yet
        self._releases: dict[
            int, int
        ] = {}  # number of ranks per release; see count_release
        self._poll = select.poll()
        self._by_file = {}
        for peer in self.peers:
            peer.connection.setblocking(False)
            self._by_file[peer.connection.fileno()] = peer
            self._poll.register(peer.connection, select.POLLIN)
        _ALL.add(self)
        weakref.finalize(self, close, connections)

    def leave(self) -> None:
        """Close this process's ends of all sockets."""
        for peer in self.peers:
            if peer.open and peer.connection.fileno() >= 0:  # else it is closed already
                self._poll.unregister(peer.connection)
            peer.open = False
            # Why no shutdown: a child's would end the connection of its rank too.
            peer.connection.close()

    def begin(self, number: int) -> int:
        """Begin a collective, unless it has begun; return the key of its first phase."""
        # Why once: before a second phase, the history may get later collectives.
        if number not in self.in_progress:
            self.in_progress[number] = self.desync.history
            self._ends[number] = time.monotonic() + self.timeout
        self._latest = max(self._latest, number)
        return 2 * number

    def publish(self, key: int, data: torch.Tensor, block: Block, offset: int = 0) -> None:
        """Write this rank's contribution into a block, and announce it."""
        block.tensor(data.numel(), data.dtype, offset=offset).copy_(data.reshape(-1))
        self.contributions[key] = (block, offset)
        self.announce(key, offset, block)

    def announce(self, key: int = 0, offset: int = 0, block: Block | None = None) -> None:
        """Send the peers a message about ``key``, if there is one, with up to two releases."""
        block_index, file = (0, None) if block is None else (block.number, block.file)
        dropped = self.blocks.dropped.pop() if self.blocks.dropped else 0
        released, self._unannounced = self._unannounced[:2], self._unannounced[2:]
        # Releases that do not fit in go with the next messages.
        message = Message(
            key, self.in_progress.get(key >> 1, 0), block_index, offset, dropped, *released
        )
        message_bytes = _NUMBERS.pack(file is not None, *message)
        for peer in self.peers:
            self._send(peer, message_bytes, file)
        if block is not None:
            block.close()

    def _send(self, peer: Peer, data: bytes, file: int | None) -> None:
        end_time = next_look = 0.0
        desync, patience = self.desync, self.desync.limits.patience
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
                end_time = end_time or current_time + self.timeout
                next_look = next_look or current_time + patience
                if current_time > end_time:
                    raise RuntimeError(
                        f"Timed out waiting {self.timeout:g} s for rank {peer.rank} to read"
                    ) from None
                if current_time > next_look:
                    desync.look(desync.number)
                    next_look = current_time + patience / 8
                # Why receive here: the peer has hundreds of messages to read, and may itself be
                # waiting until this rank reads.
                if not self.receive(0.01):
                    time.sleep(0.001)

    def receive(self, seconds: float) -> bool:
        """Receive a message from each peer that has sent one; return whether any may have come.

        It waits up to ``seconds`` for the first.
        """
        files_ready = self._poll.poll(seconds * 1000)
        for file, _ in files_ready:
            peer = self._by_file[file]
            try:
                message_bytes, received_files, _, _ = socket.recv_fds(
                    peer.connection, _NUMBERS.size, 1, socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, ConnectionResetError):
                # A reset means that the peer ended with unread messages. Its own messages can still
                # be read by the next calls.
                continue
            except OSError:
                message_bytes, received_files = b"", []
            if not message_bytes:
                peer.open = False
                self._poll.unregister(peer.connection)
                continue
            is_new, *numbers = _NUMBERS.unpack(message_bytes)
            message = Message(*numbers)
            peer.blocks.pop(message.dropped, None)
            if is_new:
                peer.blocks[message.block] = _map_received(peer, received_files)
            collective_index = message.key >> 1
            # Otherwise this rank has finished it.
            if collective_index > self._latest or collective_index in self.in_progress:
                peer.received[message.key] = message
            peer.latest = max(peer.latest, collective_index)
            for released in filter(None, (message.released, message.also_released)):
                self.count_release(released)
        return bool(files_ready)

    def wait_for(self, key: int) -> None:
        """Wait until every peer has announced the key; raise if one has issued something else."""
        desync, collective_index = self.desync, key >> 1
        desync.wait_until(functools.partial(self._have_announced, key), collective_index)
        if peer := self.first_without(key):
            desync.raise_desync(collective_index, f"rank {desync.ranks[peer.rank]}")

    def _have_announced(self, key: int, seconds: float) -> bool:
        """Wait for so long; return whether every peer has announced ``key`` or a later collective.

        Raises:
            RuntimeError: the time is over, or the process of a peer has ended.
        """
        collective_end = self._ends[key >> 1]
        end_time = min(collective_end, time.monotonic() + seconds)
        while not self.has_arrived(key):
            seconds_left = end_time - time.monotonic()
            # Why receive once more after the end: this thread may have spent the time elsewhere
            # while the messages came.
            if not self.receive(max(seconds_left, 0.0)) and seconds_left <= 0:
                if end_time < collective_end:
                    return False
                raise RuntimeError(
                    f"Timed out waiting {self.timeout:g} s for the ranks of one machine"
                )
        return True

    def has_arrived(self, key: int) -> bool:
        """Return whether every peer has announced ``key``, or a later collective instead of it.

        Raises:
            RuntimeError: the process of a peer has ended before.
        """
        all_arrived = True
        for peer in self.peers:
            # Why only the first phase counts: a peer announces the second one when it waits, which
            # may be after it has begun the next collective.
            if key in peer.received or (not key & 1 and peer.latest > key >> 1):
                continue
            if not peer.open:
                raise RuntimeError(f"Connection closed by rank {peer.rank} of the group")
            all_arrived = False
        return all_arrived

    def first_without(self, key: int) -> Peer | None:
        """Return the first peer that has not announced ``key`` with this rank's history."""
        own_history = self.in_progress[key >> 1]
        peer_without = (
            peer
            for peer in self.peers
            if key not in peer.received or peer.received[key].history != own_history
        )
        return next(peer_without, None)

    def contribution(
        self, key: int, rank: int, numel: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the first ``numel`` elements of a rank's contribution."""
        if rank == self.rank:
            block, offset = self.contributions[key]
            return block.tensor(numel, dtype, offset=offset)
        # This rank itself is not among its peers.
        peer = self.peers[rank - (rank > self.rank)]
        message = peer.received[key]
        # An all_gather_shared has the same history as an all_gather. If only the peer issues the
        # shared one, its shard lies in an output block that this rank must not read.
        if message.offset == IN_OUTPUT:
            self.desync.raise_desync(key >> 1, f"rank {self.desync.ranks[rank]}")
        return peer.blocks[message.block][
            message.offset : message.offset + numel * dtype.itemsize
        ].view(dtype)

    def all_contributions(
        self, key: int, numel: int, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Return the first ``numel`` elements of every rank's contribution, in order of ranks."""
        return [self.contribution(key, rank, numel, dtype) for rank in range(self.size)]

    def finish(self, number: int) -> None:
        """Finish a collective that this rank has read or given up: forget and release it."""
        if self.in_progress.pop(number, None) is None:
            return
        del self._ends[number]
        has_large = False
        for peer in self.peers:
            for key in (2 * number, 2 * number + 1):
                message = peer.received.pop(key, None)
                # Note: the shared output, which rank 0 announces, is released apart.
                if message and message.block and (peer.rank or message.offset != IN_OUTPUT):
                    has_large |= len(peer.blocks[message.block]) > SLAB_BYTES
        self.release(number)
        # Why at once: a peer that cannot use its large block again soon has to make another one.
        # Releases of small blocks go with the messages of the next collectives.
        while has_large and self._unannounced:
            self.announce()

    def release(self, released: int) -> None:
        """Release a collective, or a shared output by minus its number; tell the peers later."""
        if released > 0 or self.rank:  # rank 0 alone counts the releases of shared outputs
            self._unannounced.append(released)
        self.count_release(released)

    def count_release(self, released: int) -> None:
        """Count one more rank's release; the last one frees this rank's memory."""
        if released < 0 and self.rank:
            return
        release_count = self._releases[released] = self._releases.get(released, 0) + 1
        if release_count < self.size:
            return
        del self._releases[released]
        for key in (2 * released, 2 * released + 1) if released > 0 else (released,):
            if key in self.contributions:
                self.blocks.release(self.contributions.pop(key)[0])


_ALL: weakref.WeakSet[Exchange] = (
    weakref.WeakSet()
)  # those of this process, for forked children


def _leave_in_child() -> None:
    # Why: a forked child would keep the sockets open, and its messages would mix with the rank's.
    for exchange in list(_ALL):
        exchange.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)


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
        raise OSError(
            f"the shared memory of rank {peer.rank}{size_text} cannot be mapped; the system says: "
            f"{error}. Raise ulimit -n, ulimit -v or sysctl vm.max_map_count, mount /proc in the "
            "container, or pass shared_memory=False to init_mesh"
        ) from error
    finally:
        for received_file in files:
            os.close(received_file)
