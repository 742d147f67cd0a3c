"""Random trees and plans: everything that a plan accepts comes back to the bit, everywhere."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import optree
import pytest
import torch

import funcshard as fs
from tests.hostile.blame import outcome_of
from tests.hostile.campaign import Campaign
from tests.trees import random_tree, random_units

pytestmark = pytest.mark.hostile

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
WORLDS: tuple[Any, ...] = (1, 2, 3, {"replicate": 2, "shard": 2})
KINDS = (ValueError, TypeError)


def bits_of(tree: Any) -> Any:
    """Return the structure of a tree, and the dtype, the shape and the bytes of each leaf."""
    leaves, structure = optree.tree_flatten(tree)
    flat = [(leaf, leaf.detach().contiguous().view(-1).view(torch.uint8)) for leaf in leaves]
    return structure, [(leaf.dtype, leaf.shape, bytes(data.numpy())) for leaf, data in flat]


def round_trip(mesh: fs.Mesh, params: Any, plan: fs.Plan, folder: Path) -> list[str]:
    """Return in which ways a tree does not come back: from shards, a state dict and a checkpoint."""
    shards = fs.shard(params, plan, mesh)
    fs.save(folder / "saved", {"shards": shards, "step": 1}, plan, mesh)
    back = {
        "gather": shards,
        "the state dict": fs.from_state_dict(fs.to_state_dict(shards, plan, mesh), plan, mesh),
        "the checkpoint": fs.restore(folder / "saved", plan, mesh)["shards"],
    }
    return [way for way, found in back.items() if bits_of(fs.gather(found, plan, mesh)) != bits_of(params)]


def one_tree(draw: Random) -> dict[str, int]:
    params, world = random_tree(draw), draw.choice(WORLDS)
    what = f"a tree of {optree.tree_structure(params)}"
    options: dict[str, Any] = {"strategy": draw.choice(STRATEGIES)}
    if draw.random() < 0.2:
        options["bucket_bytes"] = draw.choice([0, 100, "auto"])
    if draw.random() < 0.15:
        options["precision"] = fs.MixedPrecision(param_dtype=torch.bfloat16)
    plan = outcome_of(lambda: fs.make_plan(params, world, **options), f"make_plan of {what}", KINDS)
    if isinstance(plan, Exception):
        return {"rejected": 1}
    units = random_units(draw, [leaf.path for leaf in plan.leaves])
    with_units = outcome_of(lambda: fs.make_plan(params, world, units=units, **options), f"{units} of {what}", KINDS)
    plan = plan if isinstance(with_units, Exception) else with_units
    text = outcome_of(plan.to_json, f"to_json of {what}", KINDS)
    if isinstance(text, Exception):
        return {"rejected by to_json": 1}
    again = fs.Plan.from_json(text)
    assert again == plan, f"the plan that comes back from JSON is another one, of {what}"
    assert again.fingerprint() == plan.fingerprint(), what
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        found = outcome_of(
            lambda: fs.simulate(lambda mesh: round_trip(mesh, params, again, Path(folder)), world), f"use of {what}", KINDS
        )
    if isinstance(found, Exception):
        return {"rejected by functions": 1}
    assert not any(found), f"{found[0]} gives other bits, of {what}"
    return {"accepted": 1}


@pytest.mark.nightly
def test_a_tree_that_a_plan_accepts_comes_back_to_the_bit(campaign: Campaign) -> None:
    def one(draw: Random) -> dict[str, int]:
        return sum((Counter(one_tree(draw)) for _ in range(10)), Counter(trees=10))

    campaign.run(one, short=12, full=1000, limit=120)
