"""Norms of long tensors are as exact as their dtype."""

import math

import pytest
import torch

from funcshard.train.norms import PIECE, norm_of_rows

LENGTHS = (1, PIECE, 2 * PIECE - 1, 2 * PIECE, 2 * PIECE + 1, 1200 * PIECE + 17)


def values(length: int) -> torch.Tensor:
    """Return two rows whose first elements are much larger than the others, as those of gradients can be."""
    x = torch.randn(2, length, generator=torch.Generator().manual_seed(0)).abs_()
    x[:, : 1 + length // 100] *= 100
    return x


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_norm_is_that_of_float64_up_to_rounding(length: int, norm_type: float) -> None:
    x = values(length)
    wanted = torch.linalg.vector_norm(x.double(), norm_type, dim=-1)
    found = norm_of_rows(x, norm_type, torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)


def test_one_call_of_torch_is_less_exact() -> None:
    x = values(1200 * PIECE)
    wanted = torch.linalg.vector_norm(x.double(), dim=-1)
    error = lambda found: ((found.double() - wanted) / wanted).abs().max().item()  # noqa: E731
    assert error(norm_of_rows(x, 2.0, torch.float32)) < 1e-6 < 1e-5 < error(torch.linalg.vector_norm(x, dim=-1))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_infinities_and_nan_reach_the_norm(bad: float) -> None:
    x = values(3 * PIECE)
    x[0, PIECE + 5] = bad
    found = norm_of_rows(x, 2.0, torch.float32)
    assert not found[0].isfinite()
    assert found[1].isfinite()


def test_a_narrow_dtype_is_added_up_in_a_wider_one() -> None:
    x = values(3 * PIECE).bfloat16()
    found = norm_of_rows(x, 2.0, torch.float32)
    torch.testing.assert_close(found, x.double().norm(dim=-1).float(), rtol=1e-5, atol=0)
