"""A traced step falls into sections: forward, backward and update, unit by unit."""

from __future__ import annotations

from typing import Any

import pytest

import funcshard as fs
from benchmarks.fake_ranks import fake_mesh
from funcshard.graph.memory import sections_of
from tests.graph.test_traced import CASES, PLAIN, batch_of, made

ONCE = [
    ("forward", None), ("forward", ""), ("forward", "embed"), ("forward", "blocks.0"), ("forward", "blocks.1"),
    ("forward", ""), ("backward", None), ("backward", ""), ("backward", "blocks.1"), ("backward", "blocks.0"),
]  # fmt: skip
UPDATE = [("update", None), ("update", ""), ("update", "blocks.0"), ("update", "blocks.1"), ("update", "embed")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ONCE + UPDATE),
        (CASES["remat, dropout"][1], ONCE + UPDATE),
        # No gather starts before the first use of a parameter. TorchOpt updates the first moments of all
        # units, then the second ones, then the parameters.
        (CASES["no_shard, torchopt"][1], ONCE[1:] + UPDATE + 2 * UPDATE[1:]),
        ({"accumulate": 2, "optimizer": PLAIN}, ONCE + ONCE + UPDATE),
    ],
    ids=["full_shard", "remat, dropout", "no_shard, torchopt", "micro-batches"],
)
def test_sections_follow_the_units_through_the_step(options: dict[str, Any], expected: list[tuple[str, str | None]]) -> None:
    mesh = fake_mesh({"shard": 2})
    step, state = made(mesh, **options)
    traced = fs.trace(step, state, batch_of(mesh, 0))
    found = list(sections_of(traced.graph.graph))
    assert [(section.phase, section.unit) for section in found] == expected
    inside = [node for section in found for node in section.nodes]
    assert inside == [node for node in traced.graph.graph.nodes if node.op not in ("placeholder", "output")]
