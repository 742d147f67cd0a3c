"""Collectives on gloo, which carries them over sockets, also from machine to machine.

gloo's own all-gather and reduce-scatter are rings that take two to three times as long as the two used here: one
broadcast a rank into the output's slices, and an all-to-all with a local sum. (Small shards are gathered by an all-to-all
too, one operation whatever the number of ranks.) The sum runs in order of ranks, which also makes the result independent of
the ring's cut. None of these lets gloo add, so a dtype that it has no name for (float8, int16) travels as its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from funcshard.comm.desync import DesyncDetector
from funcshard.comm.group import DeferredWork, Work, sum_in_rank_order

__all__ = ["Gloo"]

# Bytes of a gathered buffer up to which starting operations costs more than copying: it is gathered by an all-to-all.
_SMALL = 1 << 16


# those of gloo's own; torch.distributed itself shows it complex numbers as pairs
_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
           torch.bool, torch.complex64, torch.complex128}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gloo:
    """What one rank has for its collectives on one group.

    Attributes:
        rank: this process's rank.
        size: number of ranks.
        group: the process group.
        reductions: the process group that reductions run on: ``group`` itself, or another of the same ranks.
        desync: of the group; a wait that takes long asks it.
    """

    rank: int
    size: int
    group: Any
    reductions: Any
    desync: DesyncDetector

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, number: int) -> Work:
        """See ``Group``; ``number`` is the collective's in the desync, here and below."""
        if out.numel() * out.element_size() <= _SMALL:
            copies = shard.detach().repeat(self.size, *[1] * (shard.dim() - 1))
            work = dist.all_to_all_single(_known(out), _known(copies), group=self.group, async_op=True)
            return _Waits(self.desync, number, [work])
        slices = out.chunk(self.size)
        slices[self.rank].copy_(shard)
        return _Waits(self.desync, number, [self._send(part, src, self.group) for src, part in enumerate(slices)])

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, number: int) -> Work:
        """See ``Group``."""
        # the first and the last rank's own slice lies at an end, so that they need not send it to themselves
        ends = (slice(len(out), None), slice(None, -len(out)))
        others = full[ends[self.rank > 0]] if self.rank in (0, self.size - 1) else full
        sizes = [len(out)] * self.size
        sizes[self.rank] -= len(full) - len(others)
        received = torch.empty_like(others)
        rows = _known(full).shape[0] // full.shape[0]  # as gloo counts them
        sent = [rows * size for size in sizes]
        work = dist.all_to_all_single(_known(received), _known(others), sent, sent, group=self.reductions, async_op=True)

        def finish() -> None:
            self.desync.wait([work], number)
            parts = list(received.split(sizes))
            if others is not full:
                parts[self.rank] = full[-len(out) :] if self.rank else full[: len(out)]
            sum_in_rank_order(out, parts)

        return DeferredWork(finish)

    def all_reduce(self, tensor: torch.Tensor, number: int) -> Work:
        """See ``Group``."""
        flat = tensor.view(-1)
        parts = flat.tensor_split(self.size)  # sizes may differ by one, or be zero
        mine = parts[self.rank]
        received = flat.new_empty(self.size * mine.numel())
        sizes, own = [_known(part).numel() for part in parts], [_known(mine).numel()] * self.size
        scatter = dist.all_to_all_single(_known(received), _known(flat), own, sizes, group=self.reductions, async_op=True)

        def finish() -> None:
            self.desync.wait([scatter], number)
            if mine.numel():
                sum_in_rank_order(mine, received.chunk(self.size))
            works = [self._send(part, src, self.reductions) for src, part in enumerate(parts) if part.numel()]
            self.desync.wait(works, number)

        return DeferredWork(finish)

    def broadcast(self, tensor: torch.Tensor, src: int, number: int) -> Work:
        """See ``Group``."""
        return _Waits(self.desync, number, [self._send(tensor, src, self.group)])

    def all_to_all(
        self, out: torch.Tensor, full: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int], number: int
    ) -> Work:
        """See ``Group``."""
        work = dist.all_to_all_single(out, full, list(out_sizes), list(sizes), group=self.group, async_op=True)
        return _Waits(self.desync, number, [work])

    def _send(self, tensor: torch.Tensor, src: int, group: Any) -> Any:
        return dist.broadcast(_known(tensor), group=group, group_src=src, async_op=True)


def _known(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as gloo knows it: itself, or its bytes."""
    return tensor if tensor.dtype in _DTYPES else tensor.view(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class _Waits:
    desync: DesyncDetector
    number: int
    works: list[Any]

    def wait(self) -> None:
        self.desync.wait(self.works, self.number)
