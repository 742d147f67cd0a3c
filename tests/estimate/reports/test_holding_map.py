"""The map of units and ranks, compared with the shards of each rank."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.estimate.reports.holding_map import holdings

PARAMS = {
    "embed": torch.zeros(3, 3),
    "blocks": [{"w": torch.zeros(5, 3), "own": torch.zeros(2, 2)} for _ in range(3)],
    "head": torch.zeros(4, dtype=torch.bfloat16),
}
CASES: dict[str, dict[str, Any]] = {
    "one axis": {"mesh": 4},
    "one rank": {"mesh": 1},
    "hybrid": {"mesh": {"replicate": 2, "shard": 3}},
    "whole on each rank": {"mesh": 2, "strategy": "no_shard"},
    "local to a rank": {"mesh": {"replicate": 2, "shard": 2}, "local": ["blocks.*.own"]},
    "local along shard": {"mesh": {"replicate": 2, "shard": 2}, "local": {"blocks.*.own": ["shard"]}},
    "cut along tensor": {"mesh": {"shard": 2, "tensor": 2}, "local": {"blocks.*.own": {"tensor": 0}}},
    "more ranks than elements": {"mesh": 64},
}


def plan_of(case: str) -> fs.Plan:
    return fs.make_plan(PARAMS, units=["blocks.*"], **CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_the_ranks_hold_what_the_map_says(case: str) -> None:
    plan = plan_of(case)
    found = holdings(plan)
    groups = found.shard_groups()
    assert [shard for group in groups for shard in group] == list(range(plan.mesh_shape[1]))
    for row in found.rows:
        for group in groups:
            assert len({row.held(shard) for shard in group}) == 1
        for shard in range(plan.mesh_shape[1]):
            parts = [row.buffer.part(leaf, shard) for leaf in row.buffer.leaves]
            assert row.held(shard) == sum(part.end - part.begin for part in parts) * row.buffer.itemsize
        assert row.gathered == row.buffer.model_numel * row.buffer.itemsize
        ranks = Counter(row.part(rank) for rank in range(plan.world_size))
        assert sorted(ranks) == list(range(row.parts))
        assert set(ranks.values()) == {row.copies}


@pytest.mark.parametrize("case", ["one axis", "hybrid", "local to a rank", "local along shard", "cut along tensor"])
def test_a_rank_holds_as_many_bytes_as_its_shards_have(case: str) -> None:
    plan = plan_of(case)

    def main(mesh: fs.Mesh) -> dict[tuple[str, str], int]:
        shards = fs.shard(PARAMS, plan, mesh)
        return {(unit, key): leaf.nbytes for unit, keys in shards.items() for key, leaf in keys.items()}

    rows = holdings(plan).rows
    for real in fs.simulate(main, plan.mesh_axes):
        assert real == {(name, row.buffer.key): row.bytes for row in rows for name in row.group.names}


def test_the_map_of_many_ranks_is_short() -> None:
    plan = fs.make_plan(PARAMS, {"replicate": 4, "shard": 4096}, units=["blocks.*"])
    found = holdings(plan)
    assert [group[0] for group in found.shard_groups()] == [0, 4, 9, 19]
    assert len(str(found).splitlines()) == 9


def test_only_a_plan_has_holdings() -> None:
    with pytest.raises(TypeError, match="plan must be the Plan that make_plan returned; found dict"):
        holdings({})  # type: ignore[arg-type]
