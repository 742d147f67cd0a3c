"""Sums over the shard axis, between their reduce-scatter and the all-reduces along other axes.

The gradient of a unit that is cut over the shard axis and repeated along others is reduced in two
stages: a reduce-scatter, then an all-reduce along each further axis. With
``reduce="shard_each"`` the all-reduces wait for the last micro-batch, and the sums of all
micro-batches add up here until then. ``on_reduce_scattered`` sees the sums between the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from funcshard.comm import DONE
from funcshard.core.buffer_comm import BufferComm, ReduceHandle

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

    def take(self, number: int, handle: ReduceHandle, *, hold: bool) -> bool:
        """Wait for a reduce-scatter, add the sum that waits for its all-reduces, and call the hook.

        Arguments:
            number: the leaf whose gradient is reduced.
            handle: its reduction.
            hold: whether the all-reduces wait for another micro-batch.

        Returns:
            Whether the caller shall finish the reduction.
        """
        if not handle.comm.topology.cut:
            return True
        handle.work.wait()
        held = self._held.pop(number, None)
        if held is not None:
            handle.out.add_(held[0])
        if hold:
            self._held[number] = handle.out, handle.comm
        elif self._on_partial is not None:
            self._on_partial(number, handle.out)
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
