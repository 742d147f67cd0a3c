"""Sums over the shard axis, between their reduce-scatter and the all-reduces along other axes.

The gradient of a unit that is cut over the shard axis and repeated along others is reduced in two
stages: a reduce-scatter, then an all-reduce along each further axis. With
``reduce="shard_each"`` the all-reduces wait for the last micro-batch, and the sums of all
micro-batches add up here until then. ``on_reduce_scattered`` sees the sums between the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from funcshard.comm import DONE
from funcshard.core.buffer_comm import AnyReduceHandle, BucketReduceHandle, BufferComm, ReduceHandle

__all__ = ["OnPartial", "PartialSums"]

# on_partial(number of the leaf, this rank's slice of the sum over the shard axis); it may write.
OnPartial = Callable[[int, torch.Tensor], None]


class PartialSums:
    """The sums over the shard axis of one call of ``value_and_grad``, by number of the leaf.

    Arguments:
        on_partial: called with each sum before its all-reduces.
    """

    __slots__ = ("_held", "_on_partial")

    def __init__(self, on_partial: OnPartial | None) -> None:
        self._on_partial = on_partial
        self._held: dict[int, tuple[torch.Tensor, BufferComm]] = {}

    def take(self, numbers: Sequence[int], handle: AnyReduceHandle, *, hold: bool) -> bool:
        """Wait for a reduce-scatter, add the sums that wait for its all-reduces, and call the hook.

        Arguments:
            numbers: the leaves whose gradients are reduced.
            handle: their reduction.
            hold: whether the all-reduces wait for another micro-batch.

        Returns:
            Whether the caller shall finish the reduction.
        """
        bucket = isinstance(handle, BucketReduceHandle)
        whole = handle.handle if isinstance(handle, BucketReduceHandle) else handle
        if not whole.comm.topology.cut:
            return True
        whole.work.wait()
        # Why clone: a slice would keep the sums of the whole bucket in memory.
        for number, piece in zip(numbers, _slices(handle), strict=True):
            held = self._held.pop(number, None)
            if held is not None:
                piece.add_(held[0])
            if hold:
                self._held[number] = (piece.clone() if bucket else piece, whole.comm)
            elif self._on_partial is not None:
                self._on_partial(number, piece)
        return not hold

    def rest(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the leaves that the last backward did not reach, each with its whole sum."""
        for number in sorted(self._held):  # in the same order on every rank
            piece, comm = self._held.pop(number)
            if self._on_partial is not None:
                self._on_partial(number, piece)
            yield number, ReduceHandle(piece, DONE, comm).finish()

    def clear(self) -> None:
        """Drop the sums that wait."""
        self._held.clear()


def _slices(handle: AnyReduceHandle) -> list[torch.Tensor]:
    """Return views of the sums in ``handle``, in the order of the gradients that were given."""
    if not isinstance(handle, BucketReduceHandle):
        return [handle.out]
    parts = dict(zip(handle.order, handle.handle.out.split(handle.sizes), strict=True))
    return [parts[i] for i in range(len(parts))]
