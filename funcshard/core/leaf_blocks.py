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
from funcshard.plan import BufferPlan, LeafSpec, boxes, slice_offsets

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
                out_part.copy_(block_values[max(begin - block_begin, 0) : end - block_begin])

    def put(self, shard: torch.Tensor, spec: LeafSpec, buffer: BufferPlan, mesh: Mesh) -> None:
        """Write the elements of a leaf that lie in this rank's shard; of none that is packed."""
        leaf_part = buffer.part(spec, mesh.shard.rank)
        shard_elements = shard[leaf_part.in_shard]
        if not spec.cuts:
            self.write(shard_elements, leaf_part.begin)
            return
        # Note: a box of the slice is no run of the whole tensor, but lies in some of its rows.
        slice_origin = slice_offsets(spec.shape, spec.cuts, mesh.position)
        row_shape = self.shape[1:]
        for box in boxes(spec.shape, leaf_part.begin, leaf_part.end):
            row_range, *other_dims = box.moved(slice_origin).slices
            row_count = row_range.stop - row_range.start
            row_values = torch.empty((row_count, *row_shape), dtype=self.dtype, device=self.device)
            self.write(row_values.view(-1), row_range.start * math.prod(row_shape))
            shard_elements[: box.numel].view(box.sizes).copy_(row_values[:, *other_dims])
            shard_elements = shard_elements[box.numel :]
