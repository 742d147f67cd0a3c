"""Moments, and the band of reserved memory."""

import pytest

from funcshard.estimate.walk import RESERVED_RUNS, reserved_band


def test_the_band_spans_the_factors_of_the_runs() -> None:
    low, high, source = reserved_band(10**9)
    factors = [each.factor for each in RESERVED_RUNS]
    assert (low, high) == (int(10**9 * min(factors)), int(10**9 * max(factors)))
    assert "1.03 to 1.50 times" in source


BOUNDS = {
    "room for both": (100, 200, (103, 150)),
    "room for the least": (100, 115, (103, 115)),
    "room for neither": (100, 102, (102, 102)),
    "too much already": (100, 90, (100, 100)),
}


@pytest.mark.parametrize(("pools", "memory", "band"), BOUNDS.values(), ids=BOUNDS)
def test_no_device_reserves_more_than_it_has(pools: int, memory: int, band: tuple[int, int]) -> None:
    assert reserved_band(pools, memory)[:2] == band


def test_pools_are_whole_numbers_of_bytes() -> None:
    with pytest.raises(ValueError, match="pools must be"):
        reserved_band(-1)
