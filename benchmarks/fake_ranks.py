"""``FakeGroup``: a group of any number of ranks, of which only this one exists.

Its collectives take the memory that those of NCCL take, for as long, and move nothing. So one
process can run a step of the real library as one of 1,024 ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import funcshard as fs
from funcshard.comm import AllGatherWork, Group, Work, all_gather_private, concatenate


class _Holding:
    """A collective that keeps its input, as one that still runs does, until it is waited for."""

    def __init__(self, held: torch.Tensor) -> None:
        self._held: torch.Tensor | None = held

    def wait(self) -> None:
        self._held = None


@dataclass(frozen=True, slots=True)
class FakeGroup(Group):
    """One rank of a group, without the others, whose data counts as equal to that of this rank."""

    rank: int
    size: int
    global_rank: int = 0

    def subgroup(self, global_ranks: Sequence[int], axis: str) -> Group:
        return FakeGroup(self.rank % len(global_ranks), len(global_ranks))

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, *, label: str = "") -> Work:
        out.view(self.size, -1).copy_(shard.reshape(1, -1).expand(self.size, -1))
        return _Holding(shard)

    def all_gather_shared(self, shard: torch.Tensor, *, label: str = "") -> AllGatherWork:
        return all_gather_private(self, shard, label=label)

    def reduce_scatter(self, out: torch.Tensor, parts: Sequence[torch.Tensor], *, label: str = "") -> Work:
        full = parts[0] if len(parts) == 1 else concatenate(parts, self.empty(self.size * out.numel(), out))
        out.view(-1).copy_(full.view(self.size, -1)[self.rank])
        return _Holding(full)

    def all_reduce(self, tensor: torch.Tensor, *, label: str = "") -> Work:
        return _Holding(tensor)

    def broadcast(self, tensor: torch.Tensor, src: int, *, label: str = "") -> Work:
        return _Holding(tensor)

    def all_to_all(
        self, out: torch.Tensor, full: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int], *, label: str = ""
    ) -> Work:
        out.zero_()
        return _Holding(full)

    def all_gather_text(self, text: str, *, label: str = "") -> list[str]:
        return [text] * self.size


def fake_mesh(shape: Mapping[str, int], device: str = "cpu", *, rank: int = 0) -> fs.Mesh:
    """Return the mesh of one rank of a job whose other ranks do not exist; "meta" stands for an accelerator."""
    groups: dict[str, Any] = {}
    left = rank
    for axis, size in reversed(list(shape.items())):
        if size > 1:
            groups[axis] = FakeGroup(left % size, size, rank)
        left //= size
    return fs.Mesh(dict(reversed(groups.items())), torch.device(device))
