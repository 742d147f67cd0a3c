"""Leaves and their flat buffer: views without a copy."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcshard.core.flat_buffer import leaf_views, ravel, views, views_at
from funcshard.plan.unit_plan import BufferPlan, LeafSpec

shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5)
worlds = st.integers(1, 5)
SIMPLE = settings(deadline=None, derandomize=True, max_examples=60)


def buffer_of(shapes: Any, shards: int = 2, dtype: str = "float64") -> BufferPlan:
    leaves, offset = [], 0
    for i, shape in enumerate(shapes):
        leaves.append(LeafSpec(f"leaf{i}", tuple(shape), offset, i))
        offset += leaves[-1].numel
    return BufferPlan(dtype, dtype, True, tuple(leaves), shards)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_leaves(buffer: BufferPlan, seed: int = 0) -> list[torch.Tensor]:
    return [random(seed + i, *leaf.shape) for i, leaf in enumerate(buffer.leaves)]


@SIMPLE
@given(shapes, worlds)
def test_views_of_the_ravelled_leaves_are_the_leaves(shapes: Any, shards: int) -> None:
    buffer = buffer_of(shapes, shards)
    leaves = random_leaves(buffer)
    full = ravel(leaves, buffer)
    assert full.shape == (buffer.padded_numel,)
    assert not full[buffer.numel :].any()
    for found in (views(full, buffer), views_at(full, leaf_views(buffer))):
        for leaf, view in zip(leaves, found, strict=True):
            assert torch.equal(leaf, view)
            assert view.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
