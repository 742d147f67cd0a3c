"""The blocks of a leaf: a rank makes those that its shard touches, and any mesh gets the same ones.

torch's generators make one number after another, so a rank that needs the second half of a tensor
has to draw the first half too. So a raveled tensor is cut into blocks of ``BLOCK`` elements, and
each block has its own generator, whose seed is the block's number. JAX's
``jax_threefry_partitionable`` is the same idea.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from funcshard.comm import Mesh
from funcshard.plan import Box, BufferPlan, LeafSpec, slice_offsets

# Why not more: on up to this many elements torch's CPU kernels run on one thread, so the last bits
# do not depend on the number of threads.
BLOCK = 2**15


def block_count(numel: int) -> int:
    """Return the number of blocks of a tensor."""
    return -(-numel // BLOCK)


@dataclass(frozen=True, slots=True)
class LeafBlocks:
    """A tensor whose blocks are made on demand.

    Attributes:
        shape: the tensor's shape.
        dtype: its dtype.
        device: where blocks are made.
        fill: ``fill(values, block, generator)`` writes the values of one block, by its number.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    fill: Callable[[torch.Tensor, int, torch.Generator], None]

    def write(self, out: torch.Tensor, begin: int) -> None:
        """Write values into ``out``, of one dim: those from an index of the raveled tensor on."""
        numel, end = math.prod(self.shape), begin + out.numel()
        # Note: one generator serves all blocks, because ``fill`` seeds it for each.
        generator = torch.Generator("cpu" if self.device.type == "meta" else self.device)
        same_device = out.device.type == self.device.type
        for block in range(begin // BLOCK, block_count(end)):
            block_begin, block_end = block * BLOCK, min((block + 1) * BLOCK, numel)
            fits_in_out = same_device and begin <= block_begin and block_end <= end
            out_part = out[max(block_begin, begin) - begin : min(block_end, end) - begin]
            # Why whole blocks: the numbers at a block's end depend on those before them.
            block_values = out_part
            if not fits_in_out:
                block_values = torch.empty(
                    block_end - block_begin, dtype=self.dtype, device=self.device
                )
            self.fill(block_values, block, generator)
            if not fits_in_out:
                out_part.copy_(
                    block_values[max(begin - block_begin, 0) : end - block_begin]
                )

    def put(
        self, shard: torch.Tensor, spec: LeafSpec, buffer: BufferPlan, mesh: Mesh
    ) -> None:
        """Write the elements of a leaf that lie in this rank's shard; of none that is packed."""
        begin, end, in_shard = buffer.part(spec, mesh.shard.rank)
        if begin == end:
            return
        if not spec.cuts:
            self.write(shard[in_shard], begin)
            return
        # Note: a slice is no run of the whole tensor, but lies in some of its rows.
        slice_origin = slice_offsets(spec.shape, spec.cuts, mesh.position)
        row_numel = math.prod(spec.shape[1:])
        first_row, row_count = begin // row_numel, -(-end // row_numel) - begin // row_numel
        whole_rows = torch.empty(
            (row_count, *self.shape[1:]), dtype=self.dtype, device=self.device
        )
        first_of_whole = (slice_origin[0] + first_row) * math.prod(self.shape[1:])
        self.write(whole_rows.view(-1), first_of_whole)
        slice_box = Box((0, *slice_origin[1:]), (row_count, *spec.shape[1:]))
        slice_values = whole_rows[slice_box.slices].reshape(-1)[
            begin - first_row * row_numel :
        ]
        shard[in_shard].copy_(slice_values[: end - begin])
