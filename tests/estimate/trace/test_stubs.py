"""Stand-ins for repeated units have the memory layout of what the units return."""

from __future__ import annotations

import pytest
import torch

from funcshard.estimate.trace.stubs import Form


@pytest.mark.parametrize(
    ("stride", "expected"), [((3, 1), (3, 1)), ((1, 2), (1, 2)), ((6, 1), (3, 1))], ids=["rows", "columns", "with gaps"]
)
def test_a_gradient_has_the_layout_of_its_tensor_without_gaps(stride: tuple[int, int], expected: tuple[int, int]) -> None:
    assert Form((2, 3), stride, torch.float32, True).gradient().stride() == expected
