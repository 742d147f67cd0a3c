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
        found = self._wanted(begin, numel)
        return found.start - begin, self.out[
            found.start - self.begin : found.stop - self.begin
        ] if found else self.out[:0]

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
        found = (self.box.overlap(each) for each in boxes(self.shape, begin, begin + numel))
        return sum(shared.numel for shared in found if shared is not None)

    def copy_from(self, begin: int, flat: torch.Tensor) -> int:
        """Copy the wanted elements of ``flat``, which starts at ``begin``; return their number."""
        done = found = 0
        for each in boxes(self.shape, begin, begin + flat.numel()):
            if shared := self.box.overlap(each):
                values = flat[done : done + each.numel].view(each.sizes)
                here = shared.moved([-n for n in self.box.offsets])
                there = shared.moved([-n for n in each.offsets])
                with torch.no_grad():
                    self.out[here.slices].copy_(values[there.slices])
                found += shared.numel
            done += each.numel
        return found
