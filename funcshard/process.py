"""Groups over real process groups of torch.distributed.

gloo's own all-gather and reduce-scatter are rings that take two to three times as long as the two used here: one
broadcast a rank into the output's slices, and an all-to-all with a local sum. The sum runs in order of ranks, which also
makes the result independent of the ring's cut. Other backends (NCCL) use their own collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from funcshard.group import Done, Work, add_in_order

__all__ = ["ProcessGroup"]

# torch 2.13 renames the two; 2.11 has the old names only
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The ranks of one ``torch.distributed`` process group.

    Attributes:
        group: the process group.
        rank: this process's rank in it.
        size: its number of ranks.
        native: whether the backend's own collectives are used (everything but gloo).
    """

    group: Any
    rank: int
    size: int
    native: bool

    @classmethod
    def of(cls, group: Any) -> ProcessGroup:
        """Wrap a process group that this process is a member of."""
        native = "gloo" not in str(dist.get_backend(group)).lower()
        return cls(group, dist.get_rank(group), dist.get_world_size(group), native)

    @property
    def member(self) -> int:
        return dist.get_rank()

    def regroup(self, members: Sequence[int], axis: str) -> ProcessGroup:
        # only the members meet, so that the ranks of a part of the processes can do this
        backend = dist.get_backend(self.group)
        return ProcessGroup.of(dist.new_group(list(members), backend=backend, use_local_synchronization=True))

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        if self.native:
            return _Waits((_gather_single(out, shard, group=self.group, async_op=True),))
        slices = out.chunk(self.size) if out.numel() else ()
        if slices:
            slices[self.rank].copy_(shard)
        return _Waits(tuple(self._send(part, src) for src, part in enumerate(slices)))

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor) -> Work:
        if self.native:
            return _Waits((_scatter_single(out, full, group=self.group, async_op=True),))
        if not full.numel():
            return Done()
        received = torch.empty_like(full)
        work = dist.all_to_all_single(received, full, group=self.group, async_op=True)

        def finish() -> None:
            work.wait()
            add_in_order(out, received.chunk(self.size))

        return Done(finish)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        if self.native:
            return _Waits((dist.all_reduce(tensor, group=self.group, async_op=True),))
        flat = tensor.view(-1)
        parts = flat.tensor_split(self.size)  # sizes may differ by one, or be zero
        mine, sizes = parts[self.rank], [part.numel() for part in parts]
        received = flat.new_empty(self.size * mine.numel())
        scatter = dist.all_to_all_single(received, flat, [mine.numel()] * self.size, sizes, group=self.group, async_op=True)

        def finish() -> None:
            scatter.wait()
            if mine.numel():
                add_in_order(mine, received.chunk(self.size))
            for work in [self._send(part, src) for src, part in enumerate(parts) if part.numel()]:
                work.wait()

        return Done(finish)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        return _Waits((self._send(tensor, src),) if tensor.numel() else ())

    def all_gather_text(self, text: str) -> list[str]:
        # not dist.all_gather_object, which unpickles, and needs NumPy
        device = torch.accelerator.current_accelerator() if self.native else torch.device("cpu")
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
        sizes = torch.empty(self.size, dtype=torch.int64, device=device)
        self.all_gather(sizes, torch.tensor([data.numel()], device=device)).wait()
        lengths = sizes.tolist()
        longest = max(lengths)
        everyones = torch.empty(self.size * longest, dtype=torch.uint8, device=device)
        self.all_gather(everyones, torch.nn.functional.pad(data, (0, longest - data.numel()))).wait()
        rows = everyones.view(self.size, longest).tolist() if longest else [[]] * self.size
        return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]

    def _send(self, tensor: torch.Tensor, src: int) -> Any:
        return dist.broadcast(tensor, group=self.group, group_src=src, async_op=True)


@dataclass(frozen=True, slots=True)
class _Waits:
    works: tuple[Any, ...]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
