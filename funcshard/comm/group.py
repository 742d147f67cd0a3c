"""Groups: the ranks along one mesh axis, and the collectives that they run on plain tensors.

Every collective returns a ``Work``, and its result is ready once ``wait`` has returned. All groups
add in the order of ranks, and so give the same bits, except for backends that reduce by themselves,
such as NCCL (``process_groups.py``). A ``label``, the same on every rank, says in errors what a
collective is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch


class Work(Protocol):
    """A collective that has been started."""

    def wait(self) -> Any:
        """Return once the result is ready; return it, always the same, if it had no memory."""


class Op(NamedTuple):
    """A collective for ``Group.start``.

    Tensors are contiguous. The kinds are:

    - ``"all_gather"`` concatenates every rank's ``data`` into ``out``, along dim 0 in rank order;
    - ``"all_gather_shared"`` does so along the last dim, in memory that ranks may share;
    - ``"all_gather_text"`` gathers texts;
    - ``"reduce_scatter"`` concatenates the 1-D parts in ``data``, sums over ranks, and puts this
      rank's slice into ``out``. A single part must not change until ``wait`` returns. Several are
      copied, and cast to the dtype of ``out``;
    - ``"all_reduce"`` replaces ``out`` by the sum of every rank's;
    - ``"broadcast"`` replaces ``out`` by that of rank ``src``;
    - ``"all_to_all"`` sends ``sizes[i]`` elements of the 1-D ``data`` to rank i, and puts the
      ``out_sizes[i]`` that rank i sends into ``out``, in order of ranks.

    Attributes:
        kind: one of these.
        label: the purpose of the collective.
        out: the tensor that gets the result; ``None`` if ``wait`` returns it.
        data: what is sent; ``None`` if it is ``out``.
        src: the rank that sends, of a broadcast.
        out_sizes, sizes: those of an all-to-all.
    """

    kind: str
    label: str
    out: Any
    data: Any = None
    src: int = 0
    out_sizes: Sequence[int] = ()
    sizes: Sequence[int] = ()


def exchange_part(position: int, parts: Mapping[int, Op]) -> Op:
    """Return the part of a rank in an all-to-all that others have issued, with zeros.

    Arguments:
        position: of the rank in the group.
        parts: those of other ranks, by position; ranks without a part neither send nor receive.
    """
    op = next(iter(parts.values()))
    ranks = range(len(op.sizes))
    sent_sizes = [parts[i].out_sizes[position] if i in parts else 0 for i in ranks]
    received_sizes = [parts[i].sizes[position] if i in parts else 0 for i in ranks]
    out, data = op.out.new_zeros(sum(received_sizes)), op.data.new_zeros(sum(sent_sizes))
    return op._replace(out=out, data=data, out_sizes=received_sizes, sizes=sent_sizes)


class Group:
    """Ranks that communicate: a process group, an axis of a simulation, or one local rank.

    Attributes:
        rank: position of this rank in the group.
        size: number of ranks in the group.
        global_rank: number of this rank in the whole job or simulation.
    """

    __slots__ = ()

    # What every kind of group defines. Why for type checkers alone: at run time the properties
    # would be default values of a data class's fields, and isinstance is slower with an abstract
    # base.
    if TYPE_CHECKING:

        @property
        def rank(self) -> int: ...

        @property
        def size(self) -> int: ...

        @property
        def global_rank(self) -> int: ...

        def start(self, op: Op) -> Work:
            """Start a collective."""

        def subgroup(self, global_ranks: Sequence[int], axis: str) -> Group:
            """Return the group of these ranks; they, and no other ranks, have to call this."""

    @property
    def plain(self) -> Group:
        """The group without changes to its collectives."""
        return self

    def around(self, group: Group) -> Group:
        """Return ``group``, a part of this one, with those changes that parts have too."""
        return group

    def empty(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return an empty 1-D tensor to communicate with, like ``like``."""
        return like.new_empty(numel)

    def all_gather_last(
        self, shard: torch.Tensor, *, shared: bool = False, label: str = ""
    ) -> Work:
        """Concatenate every rank's contiguous ``shard``, along its last dim, in new memory.

        With ``shared``, ranks may share that memory, so none may write to it.
        """
        if shared and self.shares(shard):
            return self.start(Op("all_gather_shared", label, None, shard))
        gather_work = all_gather_private(self, shard, label=label)
        if shard.ndim == 1:
            return gather_work
        group_size, shard_shape = self.size, shard.shape

        def finish() -> torch.Tensor:
            gathered_rows = gather_work.wait().view(group_size, *shard_shape)
            return gathered_rows.movedim(0, -2).flatten(-2)

        return DeferredWork(finish)

    def shares(self, shard: torch.Tensor) -> bool:
        """Return whether ``start`` gathers shards like ``shard`` into memory of all ranks."""
        return False

    def all_gather_text(self, text: str, *, label: str = "") -> list[str]:
        """Return every rank's ``text``, in order of ranks; waits for all of them."""
        return self.start(Op("all_gather_text", label, None, text)).wait()


@dataclass(slots=True, eq=False)
class DeferredWork:
    """A collective whose first ``wait`` calls ``finish``, if there is one, and keeps the result."""

    finish: Callable[[], Any] | None = None
    result: Any = None

    def wait(self) -> Any:
        if self.finish is not None:
            self.result = self.finish()
            self.finish = None
        return self.result


# The work of a collective that has nothing left to do.
DONE = DeferredWork()


@dataclass(frozen=True, slots=True)
class PrivateAllGatherWork:
    """An all-gather whose result lies in this rank's own memory.

    Attributes:
        out: the result.
        work: the collective that fills ``out``.
    """

    out: torch.Tensor
    work: Work = DONE

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.out


def all_gather_private(
    group: Group, shard: torch.Tensor, *, label: str = ""
) -> PrivateAllGatherWork:
    """Start an all-gather along dim 0 into new memory of this rank."""
    size = group.size
    # Why never an inference tensor: the caller may have left inference mode by the time it uses the
    # result.
    with torch.inference_mode(False):
        out = group.empty(shard.numel() * size, shard).view(
            shard.shape[0] * size, *shard.shape[1:]
        )
    return PrivateAllGatherWork(out, group.start(Op("all_gather", label, out, shard)))


@dataclass(frozen=True, slots=True)
class LocalGroup(Group):
    """A group of one rank, whose collectives only copy."""

    rank: int = 0
    size: int = 1
    global_rank: int = 0

    def subgroup(self, global_ranks: Sequence[int], axis: str) -> Group:
        return self

    def start(self, op: Op) -> Work:
        if op.kind == "all_gather_text":
            return DeferredWork(result=[op.data])
        # The only kind that sends several parts.
        if op.kind == "reduce_scatter":
            op.out.copy_(concatenate(op.data).view_as(op.out))
        elif op.data is not None:
            op.out.copy_(op.data)
        return DONE


@dataclass(frozen=True, slots=True)
class WrappedGroup(Group):
    """A ``Group`` that does the same as another one, for subclasses that replace methods.

    Attributes:
        inner: the group that runs the collectives.
    """

    inner: Group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # what ``Group`` has for type checkers alone

    @property
    def plain(self) -> Group:
        return self.inner.plain

    def around(self, group: Group) -> Group:
        return self.inner.around(group)

    def empty(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        return self.inner.empty(numel, like)

    def shares(self, shard: torch.Tensor) -> bool:
        return self.inner.shares(shard)


def concatenate(
    parts: Sequence[torch.Tensor], out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the concatenation of 1-D ``parts``, in ``out`` if given; else a single part itself."""
    if len(parts) == 1:
        return parts[0] if out is None else out.copy_(parts[0])
    return torch.cat(list(parts), out=out)


def slice_parts(parts: Sequence[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
    """Return views of a range of the concatenation of ``parts`` along their last dim."""
    part_views, offset = [], 0
    for part in parts:
        # The range in this part's own numbers; it is empty if the part lies outside.
        first, last = max(begin - offset, 0), min(end - offset, part.shape[-1])
        if first < last:
            part_views.append(part.narrow(-1, first, last - first))
        offset += part.shape[-1]
    return part_views


def sum_in_rank_order(out: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Put the sum of one tensor per rank into ``out``, adding from the first rank to the last."""
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    # Why no sum(): the order of additions decides the bits, and has to be the same on every
    # carrier.
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
