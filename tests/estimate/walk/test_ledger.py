"""The timeline, which makes its moments when they are read, and the band of reserved memory."""

import pytest

from funcshard.estimate.walk import CATEGORIES, RESERVED_RUNS, Moment, Timeline, reserved_band


def row(seconds: float, **sizes: int) -> tuple[float, str, str, tuple[int, ...]]:
    return seconds, "forward", "a", tuple(sizes.get(category, 0) for category in CATEGORIES)


def test_a_timeline_equals_the_tuple_of_its_moments_and_the_highest_is_the_first_of_equals() -> None:
    sizes: list[dict[str, int]] = [{"shards": 4}, {"shards": 4, "loss": 3}, {"shards": 7}]
    timeline = Timeline([row(float(number), **each) for number, each in enumerate(sizes)], 1)
    moments = tuple(Moment(float(number), "forward", "a", each) for number, each in enumerate(sizes))
    assert timeline == moments
    assert moments == timeline
    assert timeline != moments[:2]
    assert (len(timeline), timeline[-1], timeline[1:]) == (3, moments[2], moments[1:])
    assert timeline.highest == moments[1] == max(timeline, key=lambda moment: moment.total)


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
