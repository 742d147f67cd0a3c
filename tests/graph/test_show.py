"""The text of a traced step names inputs, units and collectives; the HTML says the same."""

from __future__ import annotations

import html
import re

import pytest

import funcshard as fs
from benchmarks.fake_ranks import fake_mesh
from tests.graph.test_traced import batch_of, made

Shown = tuple[str, str]


@pytest.fixture(scope="module")
def shown() -> Shown:
    mesh = fake_mesh({"shard": 2})
    step, state = made(mesh)
    traced = fs.trace(step, state, batch_of(mesh, 0))
    return str(traced), traced._repr_html_()


@pytest.mark.parametrize(
    "line",
    [
        r"^  %\d+:f32\[36\] +state\.shards\['blocks\.1'\]\['float32'\]$",
        r"^  %\d+:i64\[4,6\] +batch$",
        r"^  ── backward blocks\.1 ──$",
        r"^  %(\d+):f32\[72\] = → gather blocks\.1 float32 288 B along shard %\d+$",
        r"^  %\d+:f32\[36\] = ← reduce-scatter blocks\.1 float32 288 B along shard %\d+$",
        r"^  %\d+:f32\[24,8\] = addmm %\d+ %\d+ %\d+$",
        r"^return %0, %1, ",
    ],
)
def test_the_text_has_a_line_for(line: str, shown: Shown) -> None:
    assert re.search(line, shown[0], re.MULTILINE)


def test_every_result_is_named_before_it_is_used(shown: Shown) -> None:
    named: set[str] = set()
    for line in shown[0].splitlines():
        result, equals, operation = line.partition(" = ")
        assert set(re.findall(r"%\d+", operation if equals else "")) <= named
        named |= set(re.findall(r"%\d+", result))


def test_the_html_holds_every_operation_of_the_text(shown: Shown) -> None:
    text, page = shown
    operations = [line for line in text.splitlines() if " = " in line]
    assert len(operations) > 50
    assert all(html.escape(line) in page for line in operations)
