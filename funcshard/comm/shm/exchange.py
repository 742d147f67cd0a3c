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

**When a process dies**, the system closes its sockets. Its peers still read what it announced
before, and raise when they wait for its next contribution.
"""

from __future__ import annotations

import socket
import time
import weakref
from collections.abc import Mapping
from datetime import timedelta

import torch

from funcshard.comm import DesyncDetector
from funcshard.comm.shm.pool import SLAB_BYTES, Block, SharedBlocks
from funcshard.comm.shm.rendezvous import close
from funcshard.comm.shm.transport import IN_OUTPUT, Message, Peer, Peers


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
        peers: all other ranks, and their messages.
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
        self.peers = Peers(
            connections, timeout, lambda: desync.look(desync.number), desync.limits.patience
        )
        self.blocks = SharedBlocks()
        self.in_progress: dict[int, int] = {}
        self.contributions: dict[int, tuple[Block, int]] = {}
        self._latest = 0  # highest number of a collective that this rank has begun
        self._unannounced: list[int] = []  # this rank's releases that no message has named yet
        self._releases: dict[int, int] = {}  # number of ranks per release; see count_release
        weakref.finalize(self, close, connections)

    def begin(self, number: int) -> int:
        """Begin a collective, unless it has begun; return the key of its first phase."""
        self.in_progress.setdefault(number, self.desync.history)
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
        self.peers.send(message, file, self.receive)
        if block is not None:
            block.close()

    def receive(self, seconds: float) -> bool:
        """Receive a message from each peer that has sent one; return whether any came.

        It waits up to ``seconds`` for the first.
        """
        any_came = False
        for peer, message in self.peers.receive(seconds):
            any_came = True
            if message is None:
                continue
            collective_index = message.key >> 1
            # Otherwise this rank has finished it.
            if collective_index > self._latest or collective_index in self.in_progress:
                peer.received[message.key] = message
            peer.latest = max(peer.latest, collective_index)
            for released in filter(None, (message.released, message.also_released)):
                self.count_release(released)
        return any_came

    def has_arrived(self, key: int) -> bool:
        """Return whether every peer has announced ``key``, or a later collective instead of it.

        Raises:
            RuntimeError: the process of a peer has ended before.
        """
        all_arrived = True
        for peer in self.peers.all:
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
            for peer in self.peers.all
            if key not in peer.received or peer.received[key].history != own_history
        )
        return next(peer_without, None)

    def contribution(self, key: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the first ``numel`` elements of a rank's contribution."""
        if rank == self.rank:
            block, offset = self.contributions[key]
            return block.tensor(numel, dtype, offset=offset)
        # This rank itself is not among its peers.
        peer = self.peers.all[rank - (rank > self.rank)]
        message = peer.received[key]
        # An all_gather_shared has the same history as an all_gather. If only the peer issues the
        # shared one, its shard lies in an output block that this rank must not read.
        if message.offset == IN_OUTPUT:
            self.desync.raise_desync(key >> 1, f"rank {self.desync.ranks[rank]}")
        return peer.blocks[message.block][
            message.offset : message.offset + numel * dtype.itemsize
        ].view(dtype)

    def all_contributions(self, key: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the first ``numel`` elements of every rank's contribution, in order of ranks."""
        return [self.contribution(key, rank, numel, dtype) for rank in range(self.size)]

    def finish(self, number: int, *, shared_output: bool = False) -> None:
        """Finish a collective that this rank has read or given up: forget its messages, release it.

        ``shared_output`` says whether it is an ``all_gather_shared``.
        """
        if self.in_progress.pop(number, None) is None:
            return
        keys = (2 * number, 2 * number + 1)
        received_messages = {
            peer.rank: peer.received.pop(key)
            for peer in self.peers.all
            for key in keys
            if key in peer.received
        }
        # Whether the peers have large blocks in this collective. In most collectives their blocks
        # are as large as this rank's. In an all_gather_shared only ranks ahead of rank 0 have one.
        has_large = any(
            len(self.contributions[key][0].memory) > SLAB_BYTES
            for key in keys
            if key in self.contributions
        )
        if shared_output:
            has_large = any(message.block for rank, message in received_messages.items() if rank)
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


class Arrival:
    """The messages of all peers under one key, as a work that ``DesyncDetector.wait`` accepts."""

    __slots__ = ("_end", "_exchange", "_key")

    def __init__(self, exchange: Exchange, key: int) -> None:
        self._exchange, self._key = exchange, key
        self._end = time.monotonic() + exchange.timeout

    def wait_and_compare(self) -> None:
        """Wait until every peer has announced the key; raise if one has issued something else."""
        desync, collective_index = self._exchange.desync, self._key >> 1
        desync.wait([self], collective_index)
        peer = self._exchange.first_without(self._key)
        if peer is not None:
            desync.raise_desync(collective_index, f"rank {desync.ranks[peer.rank]}")

    def wait(self, patience: timedelta | None = None) -> None:
        """Wait until every peer has announced the key, or a later collective instead of it.

        Raises:
            RuntimeError: the time is over, or the process of a peer has ended.
        """
        end_time = (
            self._end
            if patience is None
            else min(self._end, time.monotonic() + patience.total_seconds())
        )
        while not self._exchange.has_arrived(self._key):
            seconds_left = end_time - time.monotonic()
            # Why receive once more after the end: this thread may have spent the time elsewhere
            # while the messages came.
            if not self._exchange.receive(max(seconds_left, 0.0)) and seconds_left <= 0:
                raise RuntimeError(
                    f"Timed out waiting {self._exchange.timeout:g} s for the ranks of one machine"
                )

    def is_completed(self) -> bool:
        """Return whether waiting longer changes nothing."""
        try:
            return time.monotonic() >= self._end or self._exchange.has_arrived(self._key)
        except RuntimeError:
            return True
