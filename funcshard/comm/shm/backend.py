"""The collectives of ranks on one machine, through shared memory, by the protocol of ``exchange``.

- **all_gather**: each rank contributes its shard, and copies all shards into its output.
- **broadcast**: the source contributes its tensor, and its peers copy it.
- **all_gather_shared**: all ranks write their shards into one output block, and use it there.
- **reduce_scatter**: each rank contributes the slices of its peers, writes its own slice straight
  to its output, and adds its peers' contributions to it, in order of ranks.
- **all_reduce**: each rank contributes its tensor, and sums all of them. If the tensor is large and
  there are more than two ranks, each rank sums one part, and a second phase gathers the parts.

A rank reads when its caller waits. It reads a reduce-scatter earlier if it begins another
collective and all contributions have arrived, because that frees the memory of the gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils.torch_private import recording_or_transforming
from funcshard.comm import (
    Op,
    Work,
    concatenate,
    slice_parts,
    sum_in_rank_order,
)
from funcshard.comm.shm.exchange import IN_OUTPUT, Exchange
from funcshard.comm.shm.pool import Block, tracked_view

# Every rank sums the whole tensor of an all-reduce of at most so many bytes or ranks.
_SMALL_BYTES, _FEW_RANKS = 1 << 16, 2


class SharedMemoryBackend:
    """The collectives of one rank on one group, whose ranks run on one machine.

    Methods are as in ``Group``, with the number that the desync detector gave the collective.

    Attributes:
        exchange: this rank's side of the protocol.
        blocks: the shared memory of this rank.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._rank, self._size = exchange.rank, exchange.size
        self.exchange, self.blocks = exchange, exchange.blocks
        # Reductions that ``poll`` reads once all is there.
        self._early: list[weakref.ref[_CollectiveWork]] = []
        self._output_tensors: dict[
            int, int
        ] = {}  # live tensors in each shared output, by number
        # Other threads may append to these two lists: Python collects garbage on any thread.
        self._abandoned: list[int] = []  # collectives that were not waited for
        # The number of a shared output, once for each tensor gone.
        self._freed_tensors: list[int] = []

    def all_gather(self, op: Op, number: int) -> Work:
        """See ``Group``."""
        out, shard = op.out, op.data
        key, exchange = self._contribute(number, 0, shard), self.exchange

        def read() -> None:
            output_rows = out.view(self._size, -1)
            shards = exchange.all_contributions(key, shard.numel(), out.dtype)
            for output_row, peer_shard in zip(output_rows, shards, strict=True):
                output_row.copy_(peer_shard)

        return _CollectiveWork(self, key, read)

    def all_gather_shared(self, op: Op, number: int) -> Work:
        """See ``Group``."""
        key, shard, exchange = self._begin(number), op.data.detach(), self.exchange
        shape, dtype = shard.shape, shard.dtype
        self._output_tensors[number] = 0
        if not self._rank:
            output_bytes = shard.nbytes * self._size
            # Under minus the number, because the block outlives the collective.
            exchange.contributions[-number] = (
                self.blocks.take_or_wait(
                    output_bytes, self._busy_outputs, exchange.receive
                ),
                0,
            )
        output = self._output(key)
        # This rank is ahead of rank 0, and ``_read_output`` copies the shard to the output.
        if output is None:
            exchange.publish(key, shard, self.blocks.take(shard.nbytes))
        else:
            if shard.ndim == 1:
                output[self._rank * shard.nbytes :][: shard.nbytes].view(dtype).copy_(shard)
            else:
                whole_output = output[: shard.nbytes * self._size].view(dtype)
                _slices(whole_output, shard.shape, self._size)[self._rank].copy_(
                    shard.flatten(0, -2)
                )
            exchange.announce(
                key, IN_OUTPUT, None if self._rank else exchange.contributions[-number][0]
            )
        return _CollectiveWork(self, key, lambda: self._read_output(number, shape, dtype))

    def reduce_scatter(self, op: Op, number: int) -> Work:
        """See ``Group``."""
        own_output, rank, exchange = op.out.view(-1), self._rank, self.exchange
        # Before it reserves memory, so that what peers have released is used again.
        key = self._begin(number)
        own_numel = own_output.numel()
        peers_numel = own_numel * (self._size - 1)
        block, offset = self.blocks.reserve(peers_numel * own_output.itemsize)
        peer_slices = block.tensor(peers_numel, own_output.dtype, offset=offset)
        lower_slices, higher_slices = peer_slices.tensor_split([rank * own_numel])
        begin = 0
        # The slices of the peers go into the block. This rank's slice goes to ``out``.
        for written_part in (lower_slices, own_output, higher_slices):
            end = begin + len(written_part)
            if begin < end:
                concatenate(slice_parts(op.data, begin, end), written_part)
            begin = end
        exchange.contributions[key] = (block, offset)
        exchange.announce(key, offset, block)

        def read() -> None:
            rank_slices = []
            for peer_rank in range(self._size):
                if peer_rank == rank:
                    # Why clone: the first addition overwrites ``own_output``, so a slice that is
                    # added later must lie elsewhere.
                    rank_slices.append(own_output.clone() if rank > 1 else own_output)
                    continue
                # A contribution leaves out the slice of the rank that wrote it. So this rank's
                # slice comes one position earlier in the contributions of lower ranks.
                end = (rank + (peer_rank > rank)) * own_numel
                contribution = exchange.contribution(key, peer_rank, end, own_output.dtype)
                rank_slices.append(contribution[-own_numel:])
            sum_in_rank_order(own_output, rank_slices)

        work = _CollectiveWork(self, key, read, adds_in_place=True)
        # An inference tensor cannot be written to outside inference mode.
        if not op.out.is_inference():
            self._early.append(weakref.ref(work))
        return work

    def all_reduce(self, op: Op, number: int) -> Work:
        """See ``Group``."""
        flat, exchange = op.out.view(-1), self.exchange
        key = self._contribute(number, 0, flat)
        if self._size <= _FEW_RANKS or flat.numel() * flat.element_size() <= _SMALL_BYTES:

            def read() -> None:
                sum_in_rank_order(
                    flat, exchange.all_contributions(key, flat.numel(), flat.dtype)
                )

            return _CollectiveWork(self, key, read)

        rank_parts = flat.tensor_split(self._size)  # sizes may differ by one
        own_part = rank_parts[self._rank]
        # Contributions are whole tensors, from which this rank reads its part.
        own_begin = sum(map(torch.Tensor.numel, rank_parts[: self._rank]))

        def read_in_two_phases() -> None:
            contributions = exchange.all_contributions(
                key, own_begin + own_part.numel(), flat.dtype
            )
            sum_in_rank_order(
                own_part, [peer_part[own_begin:] for peer_part in contributions]
            )
            second_key = key + 1
            # Otherwise an earlier wait was interrupted after this.
            if second_key not in exchange.contributions:
                self._contribute(number, 1, own_part)
            exchange.wait_for(second_key)
            for rank, rank_part in enumerate(rank_parts):
                if rank != self._rank:
                    rank_part.copy_(
                        exchange.contribution(
                            second_key, rank, rank_part.numel(), flat.dtype
                        )
                    )

        return _CollectiveWork(self, key, read_in_two_phases)

    def broadcast(self, op: Op, number: int) -> Work:
        """See ``Group``."""
        tensor, src = op.out, op.src
        if src == self._rank:
            return _CollectiveWork(self, self._contribute(number, 0, tensor), lambda: None)
        key, exchange = self._begin(number), self.exchange
        exchange.announce(key)

        def read() -> None:
            tensor.view(-1).copy_(
                exchange.contribution(key, src, tensor.numel(), tensor.dtype)
            )

        return _CollectiveWork(self, key, read)

    # --- beginning and finishing a collective -----------------------------------------------------

    def _begin(self, number: int) -> int:
        """Begin a collective, unless it has begun; return the key of its first phase."""
        key = self.exchange.begin(number)
        self.poll()
        return key

    def _contribute(self, number: int, phase: int, data: torch.Tensor) -> int:
        """Begin a phase with this rank's contribution; return the phase's key."""
        key = self._begin(number) + phase
        self.exchange.publish(key, data, *self.blocks.reserve(data.nbytes))
        return key

    def poll(self) -> None:
        """Receive all messages that have come, and free what is no longer needed."""
        while self.exchange.receive(0.0):
            pass
        self._early = [work for work in self._early if _is_unfinished(work)]
        while self._abandoned:
            self.finish(self._abandoned.pop())
        while self._freed_tensors:
            tensor_index = self._freed_tensors.pop()
            self._output_tensors[tensor_index] -= 1
            self._release_output(tensor_index)

    def finish(self, number: int) -> None:
        """Finish a collective that this rank has read or given up."""
        self.exchange.finish(number)
        self._release_output(number)

    def abandon(self, number: int) -> None:
        """Let the next ``poll`` finish a collective that was not waited for. Thread-safe."""
        self._abandoned.append(number)

    # --- shared outputs ---------------------------------------------------------------------------

    def _output(self, key: int) -> torch.Tensor | None:
        """Return the bytes of a shared output; ``None`` if rank 0 has not announced them."""
        exchange, collective_index = self.exchange, key >> 1
        if not self._rank:
            block, _ = exchange.contributions[-collective_index]
            return block.tensor(len(block), torch.uint8)
        first_peer = exchange.peers[0]
        message = first_peer.received.get(key)
        if (
            message is None
            or message.offset != IN_OUTPUT
            # Note: with another history, rank 0 has issued something else.
            or message.history != exchange.in_progress[collective_index]
        ):
            return None
        return first_peer.blocks[message.block]

    def _read_output(
        self, number: int, shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the gathered tensor in a shared output; copy the shards that are not there yet."""
        freed_tensors, exchange, numel = self._freed_tensors, self.exchange, shape.numel()
        key = 2 * number
        peers, output = exchange.peers, self._output(key)
        if output is None:
            exchange.desync.raise_desync(number, f"rank {exchange.desync.ranks[0]}")
        # One more tensor is alive in it; ``tracked_view`` says when it is gone.
        self._output_tensors[number] += 1
        gathered = tracked_view(
            output, self._size * numel, dtype, lambda _: freed_tensors.append(number)
        )
        rank_rows = _slices(gathered, shape, self._size)

        def copy_shard(rank: int) -> None:
            shard = exchange.contribution(key, rank, numel, dtype)
            rank_rows[rank].copy_(shard.view(rank_rows[0].shape))

        if key in exchange.contributions:  # this rank was ahead of rank 0
            copy_shard(self._rank)
            # The message names the block once more: Exchange.finish on the peers then knows that a
            # block waits for their release.
            exchange.announce(key, IN_OUTPUT, exchange.contributions[key][0])
        # Peers that were ahead of rank 0 too may have copied their shards by now.
        while any(
            peer.received[key].offset != IN_OUTPUT for peer in peers
        ) and exchange.receive(0.0):
            pass
        for peer in peers:
            # Several ranks may copy it, with the same bytes.
            if peer.received[key].offset != IN_OUTPUT:
                copy_shard(peer.rank)
        if len(shape) > 1:
            gathered = gathered.view(*shape[:-1], -1)
        # Why a copy: inference tensors have no version counter, so a write to memory that all ranks
        # share would go unnoticed.
        return gathered.clone() if torch.is_inference_mode_enabled() else gathered

    def _release_output(self, number: int) -> None:
        """Release a shared output that neither its collective nor a tensor here uses."""
        if (
            number not in self.exchange.in_progress
            and self._output_tensors.get(number) == 0
        ):
            del self._output_tensors[number]
            self.exchange.release(-number)

    def _busy_outputs(self) -> list[Block]:
        """Return the output blocks that only other ranks still need."""
        contributions, tensors = self.exchange.contributions, self._output_tensors
        return [
            block
            for key, (block, _) in contributions.items()
            if key < 0 and -key not in tensors
        ]


@dataclass(slots=True, eq=False, weakref_slot=True)
class _CollectiveWork:
    """A collective that has been started, and that reads the contributions when it is waited for.

    Attributes:
        backend: the backend that started it.
        key: the key of its first phase.
        read: reads the contributions; ``None`` once it has.
        adds_in_place: whether ``read`` must not run twice, because it adds to the output.
        is_broken: whether it was interrupted while it did.
        result: what ``read`` has returned.
    """

    backend: SharedMemoryBackend
    key: int
    read: Callable[[], Any] | None
    adds_in_place: bool = False
    is_broken: bool = False
    result: Any = None

    def wait(self) -> Any:
        if self.read is not None:
            self.backend.exchange.wait_for(self.key)
            self._finish(self.read)
        return self.result

    def finish_if_arrived(self) -> bool:
        """Read if every rank has contributed; return whether there is nothing left to do."""
        if (
            self.read is not None
            and not self.is_broken
            and self.backend.exchange.first_without(self.key) is None
        ):
            self._finish(self.read)
        return self.read is None

    def _finish(self, read: Callable[[], Any]) -> None:
        if self.is_broken:
            raise RuntimeError(
                "a reduce-scatter was interrupted while it added up, so its output is not valid "
                "and it cannot be waited for again; run the step again"
            )
        try:
            self.result = read()
            self.read = None
        except BaseException:
            # Other reads only copy, and may run again.
            self.is_broken = self.adds_in_place
            raise
        self.backend.finish(self.key >> 1)

    def __del__(self) -> None:
        if self.read is not None:
            self.backend.abandon(self.key >> 1)


def _slices(gathered: torch.Tensor, shape: torch.Size, size: int) -> torch.Tensor:
    """Return each rank's part of a 1-D output, gathered along the last dim of ``shape``."""
    if len(shape) == 1:
        return gathered.view(size, -1)
    return gathered.view(-1, size, shape[-1]).transpose(0, 1)


def _is_unfinished(work: weakref.ref[_CollectiveWork]) -> bool:
    """Read a reduction if every rank has contributed; return whether it remains unread."""
    unfinished_work = work()
    if unfinished_work is None:
        return False
    # Why not inside a mode or transform: the sum is no part of the computation that runs there.
    if torch.is_inference_mode_enabled() or recording_or_transforming():
        return True
    return not unfinished_work.finish_if_arrived()
