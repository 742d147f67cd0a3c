"""``WrappedGroup``: a group that runs every collective of another one, to be changed in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from funcshard.comm.group import AllGatherWork, Group, Work


@dataclass(frozen=True, slots=True)
class WrappedGroup:
    """A ``Group`` that does the same as another one; subclasses replace single collectives.

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

    def subgroup(self, global_ranks: Sequence[int], axis: str) -> Group:
        return self.inner.subgroup(global_ranks, axis)

    def empty(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        return self.inner.empty(numel, like)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, *, label: str = "") -> Work:
        return self.inner.all_gather(out, shard, label=label)

    def all_gather_shared(self, shard: torch.Tensor, *, label: str = "") -> AllGatherWork:
        return self.inner.all_gather_shared(shard, label=label)

    def reduce_scatter(
        self, out: torch.Tensor, parts: Sequence[torch.Tensor], *, label: str = ""
    ) -> Work:
        return self.inner.reduce_scatter(out, parts, label=label)

    def all_reduce(self, tensor: torch.Tensor, *, label: str = "") -> Work:
        return self.inner.all_reduce(tensor, label=label)

    def broadcast(self, tensor: torch.Tensor, src: int, *, label: str = "") -> Work:
        return self.inner.broadcast(tensor, src, label=label)

    def all_to_all(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        out_sizes: Sequence[int],
        sizes: Sequence[int],
        *,
        label: str = "",
    ) -> Work:
        return self.inner.all_to_all(out, full, out_sizes, sizes, label=label)

    def all_gather_text(self, text: str, *, label: str = "") -> list[str]:
        return self.inner.all_gather_text(text, label=label)
