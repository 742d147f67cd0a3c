"""Which elements of stored tensors belong into a tensor: a run of elements, or a box.

A leaf that is stored as the plan cuts it is one run. A leaf whose slices are cut in another way
consists of boxes of the stored slices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from funcshard.plan import Box, boxes


@dataclass(frozen=True, slots=True)
class ReadItem:
    """Consecutive elements of a stored tensor that are to be read.

    Attributes:
        name: the stored tensor's name.
        begin: index of the first element in the raveled tensor.
        out: 1-D tensor to read them into; its size is their number.
    """

    name: str
    begin: int
    out: torch.Tensor

    def overlap(self, begin: int, numel: int) -> int:
        """Return how many elements among ``begin : begin + numel`` of the tensor are wanted."""
        return len(self._wanted(begin, numel))

    def copy_from(self, begin: int, flat: torch.Tensor) -> int:
        """Copy the wanted elements of ``flat``, which starts at ``begin``; return their number."""
        first, out = self.destination(begin, flat.numel())
        if out.numel():
            with torch.no_grad():
                out.copy_(flat[first : first + out.numel()])
        return out.numel()

    def destination(self, begin: int, numel: int) -> tuple[int, torch.Tensor]:
        """Return the first wanted index among ``begin : begin + numel``, and the place of these."""
        wanted_part = self._wanted(begin, numel)
        return wanted_part.start - begin, self.out[
            wanted_part.start - self.begin : wanted_part.stop - self.begin
        ] if wanted_part else self.out[:0]

    def _wanted(self, begin: int, numel: int) -> range:
        return range(max(self.begin, begin), min(self.begin + self.out.numel(), begin + numel))


@dataclass(frozen=True, slots=True)
class ReadBox:
    """A box of a stored tensor that is to be read.

    Attributes:
        name: the stored tensor's name.
        shape: the stored tensor's shape.
        box: the box.
        out: tensor to read it into, of the box's sizes and any strides.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    out: torch.Tensor

    def overlap(self, begin: int, numel: int) -> int:
        """Return how many elements among ``begin : begin + numel`` of the tensor are wanted."""
        box_overlaps = (
            self.box.overlap(leaf_box) for leaf_box in boxes(self.shape, begin, begin + numel)
        )
        return sum(shared.numel for shared in box_overlaps if shared is not None)

    def copy_from(self, begin: int, flat: torch.Tensor) -> int:
        """Copy the wanted elements of ``flat``, which starts at ``begin``; return their number."""
        done = copied_numel = 0
        for leaf_box in boxes(self.shape, begin, begin + flat.numel()):
            if shared := self.box.overlap(leaf_box):
                values = flat[done : done + leaf_box.numel].view(leaf_box.sizes)
                shared_box = shared.moved([-n for n in self.box.offsets])
                there = shared.moved([-n for n in leaf_box.offsets])
                with torch.no_grad():
                    self.out[shared_box.slices].copy_(values[there.slices])
                copied_numel += shared.numel
            done += leaf_box.numel
        return copied_numel
