"""The timeline, which makes its moments when they are read."""

import pytest

from funcshard.estimate.walk import CATEGORIES, Moment, Timeline


def row(seconds: float, **sizes: int) -> tuple[float, str, str, tuple[int, ...]]:
    return seconds, "forward", "a", tuple(sizes.get(category, 0) for category in CATEGORIES)


ROWS = [row(0.0, shards=4), row(0.5, shards=4, loss=3), row(1.0, shards=7)]
timeline = Timeline(ROWS, 1)


def test_a_timeline_equals_the_tuple_of_its_moments() -> None:
    moments = (
        Moment(0.0, "forward", "a", {"shards": 4}),
        Moment(0.5, "forward", "a", {"shards": 4, "loss": 3}),
        Moment(1.0, "forward", "a", {"shards": 7}),
    )
    assert timeline == moments
    assert moments == timeline
    assert timeline == Timeline(list(ROWS), 1)
    assert timeline != moments[:2]
    assert timeline != "moments"
    assert (len(timeline), timeline[-1], timeline[1:]) == (3, moments[2], moments[1:])
    assert repr(timeline) == repr(moments)


def test_the_highest_moment_is_the_first_of_equals() -> None:
    assert timeline.highest == timeline[1]
    assert max(timeline, key=lambda moment: moment.total) == timeline.highest


def test_a_timeline_has_no_hash() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(timeline)
