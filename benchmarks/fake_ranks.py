"""``FakeGroup``: a group of any number of ranks, of which only this one exists.

Its collectives take the memory that those of NCCL take, for as long, and move nothing. So one
process can run a step of the real library as one of 1,024 ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import funcshard as fs
from funcshard.comm import DeferredWork, Group, Op, Work, concatenate


@dataclass(frozen=True, slots=True)
class FakeGroup(Group):
    """One rank of a group, without the others, whose data counts as equal to that of this rank."""

    rank: int
    size: int
    global_rank: int = 0

    def subgroup(self, global_ranks: Sequence[int], axis: str) -> Group:
        return replace(self, rank=self.rank % len(global_ranks), size=len(global_ranks))

    def start(self, op: Op) -> Work:
        if op.kind == "all_gather_text":
            return DeferredWork(result=[op.data] * self.size)
        data = self.sent(op)
        self.move(op, data)
        # Why held: a collective that still runs keeps its input, until it is waited for.
        return DeferredWork([op.out if data is None else data].clear)

    def sent(self, op: Op) -> Any:
        """Return what a collective sends."""
        if op.kind != "reduce_scatter":
            return op.data
        if len(op.data) == 1:
            return op.data[0]
        return concatenate(op.data, self.empty(self.size * op.out.numel(), op.out))

    def move(self, op: Op, data: Any) -> None:
        """Write the result of a collective."""
        if op.kind == "all_gather":
            op.out.view(self.size, -1).copy_(data.reshape(1, -1).expand(self.size, -1))
        elif op.kind == "reduce_scatter":
            op.out.view(-1).copy_(data.view(self.size, -1)[self.rank])
        elif op.kind == "all_to_all":
            op.out.zero_()


def fake_mesh(shape: Mapping[str, int], device: str = "cpu", *, rank: int = 0) -> fs.Mesh:
    """Return the mesh of one rank of a job whose other ranks do not exist; "meta" stands for an accelerator."""
    groups: dict[str, Any] = {}
    left = rank
    for axis, size in reversed(list(shape.items())):
        if size > 1:
            groups[axis] = FakeGroup(left % size, size, rank)
        left //= size
    return fs.Mesh(dict(reversed(groups.items())), torch.device(device))
