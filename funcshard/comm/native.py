"""Collectives of a backend's own, which is NCCL's way and that of every other backend but gloo.

Reductions may have a communicator, and with it a stream, of their own, so that a gathering which starts after a reduction
does not queue behind it. The host waits for none of them: ``wait`` makes the current stream wait, and until then the work
itself keeps its tensors alive, so that no stream has to be recorded on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from funcshard.comm.group import Work

__all__ = ["Native"]

# torch 2.13 renames the two; 2.11 has the old names only
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Native:
    """What one rank has for its collectives on one group.

    Attributes:
        group: the process group.
        reductions: the process group that reductions run on: ``group`` itself, or another of the same ranks.
    """

    group: Any
    reductions: Any

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, number: int) -> Work:
        """See ``Group``; a backend counts its collectives itself, and needs no ``number``."""
        return _Queued(_gather_single(out, shard, group=self.group, async_op=True))

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, number: int) -> Work:
        """See ``Group``."""
        return _Queued(_scatter_single(out, full, group=self.reductions, async_op=True))

    def all_reduce(self, tensor: torch.Tensor, number: int) -> Work:
        """See ``Group``."""
        return _Queued(dist.all_reduce(tensor, group=self.reductions, async_op=True))

    def broadcast(self, tensor: torch.Tensor, src: int, number: int) -> Work:
        """See ``Group``."""
        return _Queued(dist.broadcast(tensor, group=self.group, group_src=src, async_op=True))

    def all_to_all(
        self, out: torch.Tensor, full: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int], number: int
    ) -> Work:
        """See ``Group``."""
        return _Queued(dist.all_to_all_single(out, full, list(out_sizes), list(sizes), group=self.group, async_op=True))


@dataclass(frozen=True, slots=True)
class _Queued:
    work: Any

    def wait(self) -> None:
        self.work.wait()  # of the current stream, for its end; the host goes on
