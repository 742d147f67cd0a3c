"""bucket: the collectives are those of a plan whose small units are groups."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import funcshard as fs
from tests.graph.passes.test_keeping import UNIT
from tests.graph.test_memory import made


def as_group(joined: str) -> str:
    """Return the name of the group that holds units which share a collective."""
    units = joined.split(" + ")
    return f"{units[0]}…{units[-1]}" if len(units) > 1 else joined


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"shape": {"replicate": 2, "shard": 2}}, id="hybrid"),
        pytest.param(
            {"precision": fs.MixedPrecision(torch.bfloat16, torch.float32), "step_options": {"accumulate": 2}},
            id="bfloat16, micro-batches",
        ),
    ],
)
def test_the_collectives_are_those_of_a_plan_with_groups(options: dict[str, Any]) -> None:
    own = fs.trace(*made(**options), torch.randn(16, 64))
    plan = made(**options, bucket_bytes=2 * UNIT)[0].plan
    joined = fs.passes.bucket(own, bucket_bytes=2 * UNIT)
    predicted = fs.predict_events(plan, micro_batches=options.get("step_options", {}).get("accumulate", 1))
    for axis in ("shard", "replicate"):  # a plan starts the all-reduces of a group one reduce-scatter later
        found = [
            dataclasses.replace(event, unit=as_group(event.unit))
            for event in joined.events
            if event.unit is not None and event.axis == axis
        ]
        assert found == [event for event in predicted if event.axis == axis]
    assert sum(event.bytes for event in joined.events) == sum(event.bytes for event in own.events)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "gathers", "reductions"),
    [
        pytest.param(UNIT, 8, 4, id="no two fit"),
        pytest.param(2 * UNIT, 4, 2, id="pairs"),
        pytest.param(3 * UNIT, 4, 2, id="three and one"),
        pytest.param("1GiB", 2, 1, id="forward and backward stay apart"),
    ],
)
def test_buckets_hold_as_many_units_as_fit(full_shard: Any, size: Any, gathers: int, reductions: int) -> None:
    kinds = [event.kind for event in fs.passes.bucket(full_shard, bucket_bytes=size).events]
    assert (kinds.count("all_gather"), kinds.count("reduce_scatter")) == (gathers, reductions)


@pytest.mark.slow
@pytest.mark.parametrize("by", [None, 1])
@pytest.mark.parametrize("fixture", ["full_shard", "shard_grad_op"])
def test_gathers_that_start_earlier_share_a_bucket(fixture: str, by: int | None, request: pytest.FixtureRequest) -> None:
    step = request.getfixturevalue(fixture)
    earlier = fs.passes.gather_earlier(step, budget="10MiB", by=by)
    joined = fs.passes.bucket(earlier, bucket_bytes="1GiB")
    assert joined.events == fs.passes.bucket(step, bucket_bytes="1GiB").events
