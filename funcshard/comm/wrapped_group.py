"""``WrappedGroup``: a group that runs every collective of another one, to be changed in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from funcshard.comm.group import AllGatherWork, Group, Op, Work


@dataclass(frozen=True, slots=True)
class WrappedGroup(Group):
    """A ``Group`` that does the same as another one; subclasses replace single methods.

    Attributes:
        inner: the group that runs the collectives.
    """

    inner: Group

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def global_rank(self) -> int:
        return self.inner.global_rank

    def around(self, group: Group) -> Group:
        """Return ``group``, a part of this group, with those changes that parts have too."""
        return self.inner.around(group) if isinstance(self.inner, WrappedGroup) else group

    def start(self, op: Op) -> Work:
        return self.inner.start(op)

    def subgroup(self, global_ranks: Sequence[int], axis: str) -> Group:
        return self.inner.subgroup(global_ranks, axis)

    def empty(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        return self.inner.empty(numel, like)

    def all_gather_shared(self, shard: torch.Tensor, *, label: str = "") -> AllGatherWork:
        return self.inner.all_gather_shared(shard, label=label)

    def all_gather_text(self, text: str, *, label: str = "") -> list[str]:
        return self.inner.all_gather_text(text, label=label)
