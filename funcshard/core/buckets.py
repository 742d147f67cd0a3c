"""Buckets: several units share a collective, because a small one takes as long as its start.

Only the data that is sent is put together: each unit keeps a shard, and gets a gathered buffer and
a gradient, of its own. Sums are taken element by element, on most backends in the order of ranks,
so there a bucket changes no bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from funcshard.core.buffer_comm import AllGatherHandle, BucketReduceHandle, BufferComm, start_gather, start_reduce

__all__ = ["UnitBucket", "bucketed"]

_MOST_COMMS = 64  # that a bucket keeps


class UnitBucket:
    """One buffer of each of several units, whose collectives may be one.

    Arguments:
        comms: the communication of the buffer in each unit, in the order of units; they are equal
            but for the unit.
    """

    def __init__(self, comms: Sequence[BufferComm]) -> None:
        self._comm = comms[0]
        self._order = {str(comm.unit): position for position, comm in enumerate(comms)}
        self._comms: dict[tuple[str, ...], BufferComm] = {}

    def comm(self, units: Sequence[str]) -> BufferComm:
        """Return the communication of a collective that some of the units share."""
        key = tuple(units)
        if key not in self._comms:
            if len(self._comms) >= _MOST_COMMS:  # a model that uses other units in every call
                self._comms.clear()
            label = f"buffer {self._comm.buffer!r} of units {' + '.join(map(repr, key))}"
            self._comms[key] = dataclasses.replace(self._comm, unit=" + ".join(key), label=label, bucket=None)
        return self._comms[key]

    def start_gather(self, shards: Sequence[tuple[str, torch.Tensor]]) -> list[AllGatherHandle]:
        """Start to gather ``(unit, shard [n])`` of several units in one collective."""
        comm = self.comm([unit for unit, _ in shards])
        whole = start_gather(torch.cat([shard for _, shard in shards]), comm, read_only=True)
        sizes = [shard.numel() for _, shard in shards]
        split = _BucketGather(whole, sizes)
        ranks = comm.mesh.shard.size
        return [AllGatherHandle(_UnitGather(split, i), comm, ranks * numel) for i, numel in enumerate(sizes)]

    def start_reduce(self, fulls: Sequence[tuple[str, Sequence[torch.Tensor]]]) -> BucketReduceHandle:
        """Start to sum ``(unit, parts)`` of several units in one collective.

        Each unit's gradient, ``[n * ranks]``, is the concatenation of its 1-D parts.
        """
        # Why sorted: gradients may arrive in another order on each rank, and every rank has to
        # concatenate them in the same one.
        order = sorted(range(len(fulls)), key=lambda i: self._order[fulls[i][0]])
        comm = self.comm([fulls[i][0] for i in order])
        ranks = comm.mesh.shard.size if comm.topology.cut else 1
        parts = [part for i in order for part in fulls[i][1]]
        sizes = [sum([part.numel() for part in fulls[i][1]]) for i in order]
        whole = torch.cat(parts)
        if comm.dtypes.reduced is not None:
            whole = whole.to(comm.dtypes.reduced)
        if ranks > 1:
            # Why by rank: each rank receives its slice of every unit, one after another.
            rows = [full.view(ranks, -1) for full in torch.split_with_sizes(whole, sizes)]
            whole = torch.cat(rows, dim=1).view(-1)
        return BucketReduceHandle(start_reduce(whole, comm, donated=True), order, [size // ranks for size in sizes])


class _BucketGather:
    """An all-gather of several units, whose result is split into separate memory for each unit."""

    def __init__(self, whole: AllGatherHandle, sizes: list[int]) -> None:
        self._whole: AllGatherHandle | None = whole
        self._sizes = sizes
        self._buffers: list[torch.Tensor | None] = []

    def take(self, number: int) -> torch.Tensor:
        """Wait, and hand over one unit's buffer."""
        if self._whole is not None:
            group = self._whole.comm.mesh.shard
            rows = self._whole.finish().view(group.size, -1)
            with torch.inference_mode(False):  # another unit may take its buffer in another mode
                buffers = [group.empty(group.size * numel, rows) for numel in self._sizes]
                parts = [buffer.view(group.size, numel) for buffer, numel in zip(buffers, self._sizes, strict=True)]
                torch.split_with_sizes_copy(rows, self._sizes, dim=1, out=parts)
            self._buffers = [*buffers]
            self._whole = None
        found, self._buffers[number] = self._buffers[number], None
        assert found is not None, f"buffer {number} of a bucket was taken twice"
        return found


@dataclass(slots=True, eq=False)
class _UnitGather:
    """One unit's part of a ``_BucketGather``, as ``AllGatherWork``."""

    split: _BucketGather
    number: int
    out: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self.out is None:
            self.out = self.split.take(self.number)
        return self.out


def bucketed(comms: Mapping[str, Sequence[BufferComm]]) -> dict[str, tuple[BufferComm, ...]]:
    """Return the communication of a bucket's units, by unit, so that they share collectives."""
    shared: dict[str, list[BufferComm]] = {unit: [] for unit in comms}
    for column in zip(*comms.values(), strict=True):
        topology = column[0].topology
        bucket = UnitBucket(column) if topology.cut or topology.repeated else None
        for own, comm in zip(shared.values(), column, strict=True):
            own.append(dataclasses.replace(comm, bucket=bucket))
    return {unit: tuple(own) for unit, own in shared.items()}
