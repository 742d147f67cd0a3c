"""Groups: the ranks along one mesh axis, and the collectives they can run on plain tensors.

A group knows nothing of units, plans or autograd. Every collective returns a ``Work``: the result is in place once its
``wait`` has returned. Reductions add in the order of ranks, so that every kind of group gives the same bits, but for those
over a backend's own collectives (`native.py`). A ``label`` says what a collective is for: it has to be the same on every
rank, and is what an error calls the collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = [
    "DONE",
    "PrivateAllGatherWork",
    "DeferredWork",
    "AllGatherWork",
    "Group",
    "LocalGroup",
    "Work",
    "sum_in_rank_order",
    "slice_parts",
    "all_gather_private",
    "concatenate",
]


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return once the result is in place."""


class AllGatherWork(Protocol):
    """What is being gathered."""

    def wait(self) -> torch.Tensor:
        """Return it, once it is in place; the same tensor every time."""


class Group(Protocol):
    """Ranks that communicate: those of one process group, of a simulation, or one alone."""

    @property
    def rank(self) -> int:
        """Position of this rank in the group."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    @property
    def global_rank(self) -> int:
        """This rank's number among all there are, the same in every group of it."""

    def subgroup(self, members: Sequence[int], axis: str) -> Group:
        """Return the group of the ranks with these numbers, of which this one is one; each of them has to call this."""

    def empty(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return a new 1-D tensor for what travels."""

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, *, label: str = "") -> Work:
        """Put every rank's contiguous ``shard`` into ``out``, one after another in order of ranks, along dim 0."""

    def all_gather_shared(self, shard: torch.Tensor, *, label: str = "") -> AllGatherWork:
        """Gather every rank's contiguous ``shard``, as ``all_gather`` does, into new memory that is only to be read.

        Other ranks may have that memory too, and read it as long as they like.
        """

    def reduce_scatter(self, out: torch.Tensor, parts: Sequence[torch.Tensor], *, label: str = "") -> Work:
        """Add what every rank's 1-D ``parts`` are side by side, and put this rank's slice of the sum into ``out``.

        Several parts are copied, and converted to the dtype of ``out``; one that is alone may be read until the end.
        """

    def all_reduce(self, tensor: torch.Tensor, *, label: str = "") -> Work:
        """Replace the contiguous ``tensor`` by the sum of every rank's."""

    def broadcast(self, tensor: torch.Tensor, src: int, *, label: str = "") -> Work:
        """Replace the contiguous ``tensor`` by rank ``src``'s."""

    def all_to_all(
        self, out: torch.Tensor, full: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int], *, label: str = ""
    ) -> Work:
        """Send each rank its run of the 1-D ``full``, ``sizes`` long; put what comes, ``out_sizes`` long, into ``out``."""

    def all_gather_text(self, text: str) -> list[str]:
        """Return every rank's ``text``, in order of ranks; waits."""


@dataclass(slots=True, eq=False)
class DeferredWork:
    """A ``Work`` whose result is in place after ``finish`` has run, once."""

    finish: Callable[[], object] | None = None

    def wait(self) -> None:
        """Run ``finish``, if there is one that has not run."""
        if self.finish is not None:
            self.finish()
            self.finish = None


DONE = DeferredWork()


@dataclass(frozen=True, slots=True)
class PrivateAllGatherWork:
    """What is being gathered, or is here, in memory of this rank's own."""

    out: torch.Tensor
    work: Work = DONE

    def wait(self) -> torch.Tensor:
        """Return it, once it is in place."""
        self.work.wait()
        return self.out


def all_gather_private(group: Group, shard: torch.Tensor, *, label: str = "") -> PrivateAllGatherWork:
    """Start ``group.all_gather`` into new memory of this rank's own."""
    size = group.size
    with torch.inference_mode(False):  # who takes it may be in another mode by then
        out = group.empty(shard.numel() * size, shard).view(shard.shape[0] * size, *shard.shape[1:])
    return PrivateAllGatherWork(out, group.all_gather(out, shard, label=label))


@dataclass(frozen=True, slots=True)
class LocalGroup:
    """One rank alone: its own data is everybody's."""

    rank: int = 0
    size: int = 1
    global_rank: int = 0

    def subgroup(self, members: Sequence[int], axis: str) -> Group:
        return self

    def empty(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(numel)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, *, label: str = "") -> Work:
        out.copy_(shard)
        return DONE

    def all_gather_shared(self, shard: torch.Tensor, *, label: str = "") -> AllGatherWork:
        return all_gather_private(self, shard, label=label)

    def reduce_scatter(self, out: torch.Tensor, parts: Sequence[torch.Tensor], *, label: str = "") -> Work:
        out.copy_(concatenate(parts).view_as(out))
        return DONE

    def all_reduce(self, tensor: torch.Tensor, *, label: str = "") -> Work:
        return DONE

    def broadcast(self, tensor: torch.Tensor, src: int, *, label: str = "") -> Work:
        return DONE

    def all_to_all(
        self, out: torch.Tensor, full: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int], *, label: str = ""
    ) -> Work:
        out.copy_(full)
        return DONE

    def all_gather_text(self, text: str) -> list[str]:
        return [text]


def concatenate(parts: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Return 1-D tensors as one, in ``out`` if it is given; one that is alone is that one itself if it is not."""
    if len(parts) == 1:
        return parts[0] if out is None else out.copy_(parts[0])
    return torch.cat(list(parts), out=out)


def slice_parts(parts: Sequence[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
    """Return what of 1-D tensors side by side lies from element ``begin`` to ``end``."""
    found, at = [], 0
    for part in parts:
        first, last = max(begin - at, 0), min(end - at, part.numel())
        if first < last:
            found.append(part[first:last])
        at += part.numel()
    return found


def sum_in_rank_order(out: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Put the sum of ``parts`` into ``out``, adding from the first to the last: the one order of every reduction."""
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
