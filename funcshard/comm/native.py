"""Collectives for NCCL and every other backend but gloo: the backend's own.

Reductions may have a separate communicator. They then run on a separate stream too, so an
all-gather that starts after a reduction does not queue behind it.

The host waits for none of these collectives. ``wait`` makes the current stream wait. Until then
torch's work object keeps the tensors alive, so ``record_stream`` is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from funcshard.comm.group import Work

# torch 2.13 renames both functions; torch 2.11 has the old names only.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Native:
    """The collectives of one rank in one group, over the backend's own.

    Each method is as in ``Group``, and takes the number of the collective as the methods of
    ``Gloo`` do. The backend counts by itself, and ignores it.

    Attributes:
        group: the process group.
        reductions: the process group for reductions: ``group`` itself, or another of the same
            ranks.
    """

    group: Any
    reductions: Any

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, number: int) -> Work:
        return _StreamWork(gather_single(out, shard, group=self.group, async_op=True))

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, number: int) -> Work:
        return _StreamWork(scatter_single(out, full, group=self.reductions, async_op=True))

    def all_reduce(self, tensor: torch.Tensor, number: int) -> Work:
        return _StreamWork(dist.all_reduce(tensor, group=self.reductions, async_op=True))

    def broadcast(self, tensor: torch.Tensor, src: int, number: int) -> Work:
        return _StreamWork(dist.broadcast(tensor, group=self.group, group_src=src, async_op=True))

    def all_to_all(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        out_sizes: Sequence[int],
        sizes: Sequence[int],
        number: int,
    ) -> Work:
        return _StreamWork(
            dist.all_to_all_single(
                out, full, list(out_sizes), list(sizes), group=self.group, async_op=True
            )
        )


@dataclass(frozen=True, slots=True)
class _StreamWork:
    """A collective on a stream; ``wait`` makes the current stream wait for it, and not the host."""

    work: Any

    def wait(self) -> None:
        self.work.wait()
