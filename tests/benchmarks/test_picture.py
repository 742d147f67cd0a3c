"""The picture of a race shows every peer beside the one whose time is 1."""

import json

import pytest

from benchmarks.picture import draw, main

RACE = {
    "shape": "demo",
    "ranks": 2,
    "seconds": {"ddp": [2.0, 2.2, 2.1], "fsdp2": [3.0, 3.1, 3.2], "full_shard": [1.9, 2.0, 1.8]},
}


@pytest.mark.slow
def test_a_panel_has_a_bar_for_each_peer_and_names_the_ratio():
    (axes,) = draw([RACE]).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["FSDP2", "funcshard full_shard"]
    assert [round(bar.get_width(), 3) for bar in axes.patches] == [round(3.1 / 2.1, 3), round(1.9 / 2.1, 3)]
    assert {"1.48", "0.90"} <= {text.get_text() for text in axes.texts}
    assert axes.get_title(loc="left") == "GPT, 10.8 M, 2 ranks"


def test_a_race_without_the_reference_is_left_out():
    other = {"shape": "deep", "ranks": 4, "seconds": {"jax": [1.0], "full_shard": [2.0]}}
    assert len(draw([RACE, other]).axes) == 1
    with pytest.raises(ValueError, match="no race has the peer 'ddp'; name it in --peers"):
        draw([other])


def test_the_command_writes_the_same_picture_twice(tmp_path):
    (tmp_path / "race.json").write_text(json.dumps({"races": [RACE]}))
    for name in ("a.svg", "b.svg"):
        main([str(tmp_path / "race.json"), str(tmp_path / name)])
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text() != ""
