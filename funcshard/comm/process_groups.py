"""Collectives over process groups of torch: ``Gloo``, and ``Native`` for every other backend.

gloo sends data through sockets, also between machines. Its own all-gather and reduce-scatter are
rings, which take two to three times as long as the algorithms here, and add in an order that
depends on the place of an element. Here every sum runs in the order of ranks. gloo never adds, so
dtypes that it does not know (float8, int16) are sent as bytes.

Methods are as in ``Group``, with the number that the desync detector gave the collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from funcshard.comm.desync import DesyncDetector
from funcshard.comm.group import DeferredWork, Op, Work, sum_in_rank_order

# torch 2.13 renames both functions; torch 2.11 has the old names only.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Largest output of an all-gather, in bytes, that is gathered by one all-to-all. Up to this size,
# starting one operation per rank costs more than copying the shard for every rank.
_SMALL = 1 << 16

# The dtypes that gloo knows. torch.distributed passes complex tensors to gloo as pairs of numbers.
_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
           torch.bool, torch.complex64, torch.complex128}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gloo:
    """The collectives of one rank in one group, over gloo.

    Attributes:
        rank: position of this rank in the group.
        size: number of ranks.
        group: the process group.
        desync: the group's detector, which does the waiting.
    """

    rank: int
    size: int
    group: Any
    desync: DesyncDetector

    def all_gather(self, op: Op, number: int) -> Work:
        out, shard = op.out, op.data
        if out.numel() * out.element_size() <= _SMALL:
            shard_copies = shard.detach().repeat(self.size, *[1] * (shard.dim() - 1))
            shard_sizes = [shard.numel()] * self.size
            work = self._start_exchange(out, shard_copies, shard_sizes, shard_sizes)
            return self._work([work], number)
        rank_slices = out.chunk(self.size)
        # Each rank broadcasts its own slice from where it lies in the output.
        rank_slices[self.rank].copy_(shard)
        works = [
            self._start_broadcast(rank_slice, src)
            for src, rank_slice in enumerate(rank_slices)
        ]
        return self._work(works, number)

    def reduce_scatter(self, op: Op, number: int) -> Work:
        out, full_tensor = op.out.view(-1), op.data[0]
        # Why the first and the last rank leave out their own slice: it lies at an end of ``full``,
        # so the rest is contiguous, and they need not send the slice to themselves.
        ends = (slice(len(out), None), slice(None, -len(out)))
        sent_slices = (
            full_tensor[ends[self.rank > 0]]
            if self.rank in (0, self.size - 1)
            else full_tensor
        )
        slice_sizes = [len(out)] * self.size
        slice_sizes[self.rank] -= len(full_tensor) - len(sent_slices)
        received_slices = torch.empty_like(sent_slices)
        work = self._start_exchange(received_slices, sent_slices, slice_sizes, slice_sizes)

        def finish() -> None:
            self.desync.wait([work], number)
            rank_parts = list(received_slices.split(slice_sizes))
            if sent_slices is not full_tensor:
                rank_parts[self.rank] = (
                    full_tensor[-len(out) :] if self.rank else full_tensor[: len(out)]
                )
            # Why here: it runs in the caller's thread, once it needs the result.
            sum_in_rank_order(out, rank_parts)

        return DeferredWork(finish)

    def all_reduce(self, op: Op, number: int) -> Work:
        flat = op.out.view(-1)
        rank_parts = flat.tensor_split(self.size)  # sizes may differ by one, or be zero
        own_part = rank_parts[self.rank]
        # Note: each rank sums one part, and then broadcasts it.
        received_parts = flat.new_empty(self.size * own_part.numel())
        part_sizes = [rank_part.numel() for rank_part in rank_parts]
        own_sizes = [own_part.numel()] * self.size
        scatter_work = self._start_exchange(received_parts, flat, own_sizes, part_sizes)

        def finish() -> None:
            self.desync.wait([scatter_work], number)
            # There are more ranks than elements if it is empty.
            if own_part.numel():
                sum_in_rank_order(own_part, received_parts.chunk(self.size))
            works = [
                self._start_broadcast(rank_part, src)
                for src, rank_part in enumerate(rank_parts)
                if rank_part.numel()
            ]
            self.desync.wait(works, number)

        return DeferredWork(finish)

    def broadcast(self, op: Op, number: int) -> Work:
        return self._work([self._start_broadcast(op.out, op.src)], number)

    def all_to_all(self, op: Op, number: int) -> Work:
        return self._work(
            [self._start_exchange(op.out, op.data, op.out_sizes, op.sizes)], number
        )

    def _work(self, works: list[Any], number: int) -> Work:
        # Why deferred: torch's works keep what was sent, and a wait drops them.
        return DeferredWork(lambda: self.desync.wait(works, number))

    def _start_broadcast(self, tensor: torch.Tensor, src: int) -> Any:
        return dist.broadcast(
            _as_known(tensor), group=self.group, group_src=src, async_op=True
        )

    def _start_exchange(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        out_sizes: Sequence[int],
        sizes: Sequence[int],
    ) -> Any:
        """Start to send each rank elements of ``full``, and to receive others in ``out``."""
        width = 1 if out.dtype in _DTYPES else out.element_size()
        receive_sizes, send_sizes = (
            [width * size for size in part] for part in (out_sizes, sizes)
        )
        return dist.all_to_all_single(
            _as_known(out.view(-1)),
            _as_known(full.view(-1)),
            receive_sizes,
            send_sizes,
            group=self.group,
            async_op=True,
        )


def _as_known(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor itself if gloo knows its dtype, else a view of its bytes."""
    return tensor if tensor.dtype in _DTYPES else tensor.view(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Native:
    """The collectives of one rank in one group, as the backend itself has them, such as NCCL.

    Reductions have a separate communicator, so that an all-gather that starts after a reduction
    does not queue behind it. The current stream waits for a collective, and not the host.

    Attributes:
        group: the process group.
        reductions: the process group for reductions.
    """

    group: Any
    reductions: Any

    # Note: torch's works keep tensors alive until their wait, so ``record_stream`` is not needed.

    def all_gather(self, op: Op, number: int) -> Any:
        return gather_single(op.out, op.data, group=self.group, async_op=True)

    def reduce_scatter(self, op: Op, number: int) -> Any:
        return scatter_single(
            op.out.view(-1), op.data[0], group=self.reductions, async_op=True
        )

    def all_reduce(self, op: Op, number: int) -> Any:
        return dist.all_reduce(op.out, group=self.reductions, async_op=True)

    def broadcast(self, op: Op, number: int) -> Any:
        return dist.broadcast(op.out, group=self.group, group_src=op.src, async_op=True)

    def all_to_all(self, op: Op, number: int) -> Any:
        sizes = [*op.out_sizes], [*op.sizes]
        return dist.all_to_all_single(
            op.out, op.data, *sizes, group=self.group, async_op=True
        )
