"""Collectives for NCCL and every other backend but gloo: the backend's own.

Reductions may have a separate communicator, so that an all-gather that starts after a reduction
does not queue behind it. The host waits for none of these collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from funcshard.comm.group import Op, Work

# torch 2.13 renames both functions; torch 2.11 has the old names only.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Native:
    """The collectives of one rank in one group, over the backend's own.

    Methods are as in ``Group``; the number of the collective is ignored.

    Attributes:
        group: the process group.
        reductions: the process group for reductions.
    """

    group: Any
    reductions: Any

    def all_gather(self, op: Op, number: int) -> Work:
        return _StreamWork(gather_single(op.out, op.data, group=self.group, async_op=True))

    def reduce_scatter(self, op: Op, number: int) -> Work:
        return _StreamWork(
            scatter_single(op.out.view(-1), op.data[0], group=self.reductions, async_op=True)
        )

    def all_reduce(self, op: Op, number: int) -> Work:
        return _StreamWork(dist.all_reduce(op.out, group=self.reductions, async_op=True))

    def broadcast(self, op: Op, number: int) -> Work:
        return _StreamWork(
            dist.broadcast(op.out, group=self.group, group_src=op.src, async_op=True)
        )

    def all_to_all(self, op: Op, number: int) -> Work:
        sizes = [*op.out_sizes], [*op.sizes]
        return _StreamWork(
            dist.all_to_all_single(op.out, op.data, *sizes, group=self.group, async_op=True)
        )


@dataclass(frozen=True, slots=True)
class _StreamWork:
    """A collective on a stream, for which the current stream waits, and not the host."""

    work: Any

    def wait(self) -> None:
        # Note: torch's work keeps the tensors alive until here, so ``record_stream`` is not needed.
        self.work.wait()
