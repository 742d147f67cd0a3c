"""Which box of a whole tensor a rank's slice of a leaf is, and of which boxes a run consists.

State dicts and checkpoints hold the *whole tensor* of a leaf that is cut along mesh axes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from funcshard.plan.unit_plan import LeafCut


class Box(NamedTuple):
    """A box of a tensor.

    Attributes:
        offsets: index of its first element in each dimension.
        sizes: its length in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that takes the box out of the tensor."""
        return tuple(
            slice(begin, begin + size) for begin, size in zip(self.offsets, self.sizes, strict=True)
        )

    def moved(self, by: Sequence[int]) -> Box:
        """Return the box at offsets that are larger by ``by``."""
        return Box(tuple(map(operator.add, self.offsets, by)), self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """Return the box of the elements that lie in both boxes, if there are any."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, map(operator.add, *self), map(operator.add, *other))
        sizes = tuple(map(operator.sub, ends, offsets))
        # A scalar has no dimension that could be empty.
        return Box(offsets, sizes) if min(sizes, default=1) > 0 else None


def own_axes(local: Iterable[str], cuts: Iterable[LeafCut]) -> tuple[str, ...]:
    """Return the axes along which a leaf differs without being a slice of a whole tensor."""
    cut_axes = {cut.axis for cut in cuts}
    return tuple(axis for axis in local if axis not in cut_axes)


def slice_offsets(
    shape: Sequence[int], cuts: Sequence[LeafCut], position: Mapping[str, int]
) -> tuple[int, ...]:
    """Return where a slice begins in the whole tensor, in each dimension.

    Arguments:
        shape: shape of the slice.
        cuts: the cuts that made it, outermost first.
        position: index of the rank along each mesh axis; 0 along axes that are left out.

    Example:
        >>> cuts = LeafCut("expert", 0, 2), LeafCut("tensor", 0, 3)
        >>> slice_offsets((4, 5), cuts, {"expert": 1, "tensor": 2})
        (20, 0)
    """
    offsets = [0 for _ in shape]
    sizes = list(shape)
    for cut in reversed(cuts):  # the innermost cut first
        offsets[cut.dim] += position.get(cut.axis, 0) * sizes[cut.dim]
        sizes[cut.dim] *= cut.ranks
    return tuple(offsets)


def boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Split the elements ``begin : end`` of a raveled tensor into boxes, in order.

    Example:
        >>> [tuple(box) for box in boxes((3, 4), 2, 9)]
        [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if not shape:
        return [Box((), ())] * (end - begin)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    run_boxes = []
    while begin < end:
        # The outermost dimension of which a whole row begins here, and as many rows as there are.
        dim = next(
            dim
            for dim, stride in enumerate(strides)
            if begin % stride == 0 and begin + stride <= end
        )
        offsets = [begin // stride % size for stride, size in zip(strides, shape, strict=True)]
        rows = min((end - begin) // strides[dim], shape[dim] - offsets[dim])
        sizes = (*[1] * dim, rows, *shape[dim + 1 :])
        run_boxes.append(Box(tuple(offsets), sizes))
        begin += rows * strides[dim]
    return run_boxes
