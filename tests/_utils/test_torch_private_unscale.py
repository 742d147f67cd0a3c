"""Fused kernels compute what the operations that they fuse compute, to the bit."""

import torch

from funcshard._utils.torch_private import unscale_in_place
from tests.pairwise import crossed

CPU = torch.device("cpu")
VALUES = {
    "finite": (1.5, -2.0, 3e38, 1e-40),
    "an infinity": (1.0, float("inf")),
    "a negative infinity": (float("-inf"), 2.0),
    "NaN": (1.0, float("nan"), 2.0),
    "none": (),
}


@crossed(factor=[1.0, 0.1, 2.0**-20, 2.0**20], dtype=[torch.float32, torch.float64, torch.complex64], values=VALUES)
def test_unscaling_multiplies_to_the_bit_and_finds_what_is_not_finite(
    values: tuple[float, ...], dtype: torch.dtype, factor: float
) -> None:
    x, scalar = torch.tensor(values, dtype=dtype), torch.tensor(factor)
    real = torch.view_as_real(x) if dtype.is_complex else x
    wanted, finite = real * scalar.to(real), bool(x.isfinite().all())
    found = unscale_in_place([x, torch.ones(2)], {CPU: scalar})
    assert found[CPU].item() == (not finite)
    assert torch.equal(torch.view_as_real(x) if dtype.is_complex else x, wanted) or not finite
    torch.testing.assert_close(torch.view_as_real(x) if dtype.is_complex else x, wanted, rtol=0, atol=0, equal_nan=True)
