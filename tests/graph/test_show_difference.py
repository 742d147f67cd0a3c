"""Traced.diff says which lines are new, gone or elsewhere, and how collectives and memory change."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import funcshard as fs
from funcshard.graph.show import _changes


@pytest.mark.slow
def test_a_step_is_equal_to_itself(full_shard: Any) -> None:
    found = full_shard.diff(full_shard.changed(lambda step_graph: step_graph.copy()))
    assert found.collectives == found.operations == ()
    assert "Operations: the same, in the same order." in str(found)


def test_collectives_that_go_come_first_with_their_bytes(full_shard: Any) -> None:
    kept = fs.passes.keep_gathered(full_shard, budget="200KiB")
    found = full_shard.diff(kept)
    text = str(found)
    assert found.collectives == (
        "gone: → gather blocks.3 float32 129.2 KiB along shard",
        "gone: ← gather blocks.3 float32 129.2 KiB along shard",
    )
    assert "gathers            8 of 1.0 MiB  7 of 904.8 KiB" in text
    assert text.index("peak gathered") < text.index("gone: →") < text.index("Operations")
    assert [line.replace("new", "gone") for line in kept.diff(full_shard).collectives] == [*found.collectives]


def test_moved_lines_are_earlier_or_later_and_long_lists_end(full_shard: Any) -> None:
    early = fs.passes.update_early(full_shard)
    there = full_shard.diff(early).operations
    assert "earlier: f32[8272] = div_ f32[8272] 4" in there
    assert "later: f32[8272] = div_ f32[8272] 4" in early.diff(full_shard).operations
    html = dataclasses.replace(full_shard.diff(early), operations=10 * there)._repr_html_()
    assert f"and {10 * len(there) - 40} more" in html
    assert html.count("<li>") == 41


def test_diff_takes_a_traced_step(full_shard: Any) -> None:
    with pytest.raises(TypeError, match="diff takes another traced step, such as the result of a pass; found StepMemory"):
        full_shard.diff(full_shard.memory())


def test_lines_that_come_and_go_stand_in_the_order_of_the_step() -> None:
    assert _changes("abcd", "axbc") == ["new: x", "gone: d"]
