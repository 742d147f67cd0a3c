"""Groups: the ranks along one mesh axis, and the collectives that they run on plain tensors.

A ``Group`` knows nothing of units, plans or autograd. Every collective returns a ``Work``, and its
result is ready once ``wait`` has returned. Every group adds in the order of ranks, so all groups
give the same bits. The exceptions are the backends that reduce by themselves, such as NCCL
(``native.py``).

A ``label`` says what a collective is for, and appears in error messages. Every rank has to give the
same label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Work(Protocol):
    """A collective that has been started."""

    def wait(self) -> None:
        """Return once the result is ready; may be called again."""


class AllGatherWork(Protocol):
    """An all-gather that has been started, and that chooses the memory of its result."""

    def wait(self) -> torch.Tensor:
        """Return the gathered tensor once it is ready; every call returns the same tensor."""


class Group(Protocol):
    """Ranks that communicate: a process group, an axis of a simulation, or one local rank."""

    @property
    def rank(self) -> int:
        """Position of this rank in the group."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    @property
    def global_rank(self) -> int:
        """Number of this rank in the whole job or simulation, the same in each of its groups."""

    def subgroup(self, global_ranks: Sequence[int], axis: str) -> Group:
        """Return the group of these ranks; each of them, and no other rank, has to call this."""

    def empty(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return an empty 1-D tensor to communicate with, of the dtype and device of ``like``."""

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, *, label: str = "") -> Work:
        """Concatenate every rank's contiguous ``shard`` into ``out``, along dim 0 in rank order."""

    def all_gather_shared(self, shard: torch.Tensor, *, label: str = "") -> AllGatherWork:
        """Concatenate every rank's contiguous ``shard``, along its last dim, in new memory.

        Several ranks may share that memory, so no rank may write to it. Each may read it for as
        long as it likes.
        """

    def reduce_scatter(
        self, out: torch.Tensor, parts: Sequence[torch.Tensor], *, label: str = ""
    ) -> Work:
        """Concatenate the 1-D ``parts``, sum over ranks, and put this rank's slice into ``out``.

        Several parts are copied, and converted to the dtype of ``out``. A single part is not
        copied. The group may read it until ``wait`` returns, so it must not change before then.
        """

    def all_reduce(self, tensor: torch.Tensor, *, label: str = "") -> Work:
        """Replace the contiguous ``tensor`` by the sum of every rank's."""

    def broadcast(self, tensor: torch.Tensor, src: int, *, label: str = "") -> Work:
        """Replace the contiguous ``tensor`` by that of rank ``src``."""

    def all_to_all(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        out_sizes: Sequence[int],
        sizes: Sequence[int],
        *,
        label: str = "",
    ) -> Work:
        """Send a slice of the 1-D ``full`` to each rank, and put the received slices into ``out``.

        Slices lie in the order of ranks. Rank i is sent ``sizes[i]`` elements, and sends
        ``out_sizes[i]`` elements.
        """

    def all_gather_text(self, text: str, *, label: str = "") -> list[str]:
        """Return every rank's ``text``, in order of ranks; waits for all of them."""


@dataclass(slots=True, eq=False)
class DeferredWork:
    """A ``Work`` whose first ``wait`` calls ``finish``; without ``finish`` it is done already."""

    finish: Callable[[], object] | None = None

    def wait(self) -> None:
        """Call ``finish``, unless an earlier ``wait`` has done so."""
        if self.finish is not None:
            self.finish()
            self.finish = None


# The work of a collective that has nothing left to do.
DONE = DeferredWork()


@dataclass(frozen=True, slots=True)
class PrivateAllGatherWork:
    """An ``AllGatherWork`` whose result lies in memory of this rank's own.

    Attributes:
        out: the result.
        work: the collective that fills ``out``; without it ``out`` is ready already.
    """

    out: torch.Tensor
    work: Work = DONE

    def wait(self) -> torch.Tensor:
        """Return ``out`` once it is ready."""
        self.work.wait()
        return self.out


def all_gather_private(
    group: Group, shard: torch.Tensor, *, label: str = ""
) -> PrivateAllGatherWork:
    """Start ``group.all_gather`` into new memory of this rank's own."""
    size = group.size
    # Why never an inference tensor: the caller may have left inference mode by the time it uses the
    # result.
    with torch.inference_mode(False):
        out = group.empty(shard.numel() * size, shard).view(shard.shape[0] * size, *shard.shape[1:])
    return PrivateAllGatherWork(out, group.all_gather(out, shard, label=label))


@dataclass(slots=True, eq=False)
class _LastDimWork:
    """An all-gather along dim 0 of which the caller wants the last dim; see ``all_gather_last``."""

    work: AllGatherWork
    size: int
    out: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self.out is None:
            gathered_rows = self.work.wait()
            gathered_rows = gathered_rows.view(
                self.size, gathered_rows.shape[0] // self.size, *gathered_rows.shape[1:]
            )
            self.out = gathered_rows.movedim(0, -2).flatten(-2)
        return self.out


def all_gather_last(group: Group, shard: torch.Tensor, *, label: str = "") -> AllGatherWork:
    """Start an all-gather along the last dim of ``shard`` into new memory of this rank's own."""
    work = all_gather_private(group, shard, label=label)
    return work if shard.ndim == 1 else _LastDimWork(work, group.size)


@dataclass(frozen=True, slots=True)
class LocalGroup:
    """A group of one rank, whose collectives only copy."""

    rank: int = 0
    size: int = 1
    global_rank: int = 0

    def subgroup(self, global_ranks: Sequence[int], axis: str) -> Group:
        return self

    def empty(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(numel)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, *, label: str = "") -> Work:
        out.copy_(shard)
        return DONE

    def all_gather_shared(self, shard: torch.Tensor, *, label: str = "") -> AllGatherWork:
        return all_gather_last(self, shard, label=label)

    def reduce_scatter(
        self, out: torch.Tensor, parts: Sequence[torch.Tensor], *, label: str = ""
    ) -> Work:
        out.copy_(concatenate(parts).view_as(out))
        return DONE

    def all_reduce(self, tensor: torch.Tensor, *, label: str = "") -> Work:
        return DONE

    def broadcast(self, tensor: torch.Tensor, src: int, *, label: str = "") -> Work:
        return DONE

    def all_to_all(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        out_sizes: Sequence[int],
        sizes: Sequence[int],
        *,
        label: str = "",
    ) -> Work:
        out.copy_(full)
        return DONE

    def all_gather_text(self, text: str, *, label: str = "") -> list[str]:
        return [text]


def concatenate(parts: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the concatenation of 1-D ``parts``, in ``out`` if given; else a single part itself."""
    if len(parts) == 1:
        return parts[0] if out is None else out.copy_(parts[0])
    return torch.cat(list(parts), out=out)


def slice_parts(parts: Sequence[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
    """Return views of elements ``begin`` to ``end`` of the concatenation of 1-D ``parts``."""
    views, offset = [], 0
    for part in parts:
        first, last = max(begin - offset, 0), min(end - offset, part.numel())
        if first < last:
            views.append(part[first:last])
        offset += part.numel()
    return views


def sum_in_rank_order(out: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Put the sum of one tensor per rank into ``out``, adding from the first rank to the last."""
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
