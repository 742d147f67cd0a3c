"""Layouts, which plans of one model share."""

import torch

import funcshard as fs

PARAMS = {
    "blocks.1.w": torch.zeros(3),
    "blocks.1-x.w": torch.zeros(5),
    "blocks.10.w": torch.zeros(7),
    "blocks.1": torch.zeros(2),
}


def test_plans_for_other_meshes_and_strategies_share_the_leaves_of_their_buffers() -> None:
    one = fs.make_plan(PARAMS, 2, units=["blocks.10"])
    other = fs.make_plan(PARAMS, {"replicate": 4, "shard": 8}, units=["blocks.10"], strategy="shard_grad_op")
    assert [unit.buffers[0].shards for unit in (*one.unit_list, *other.unit_list)] == [2, 2, 8, 8]
    for first, second in zip(one.unit_list, other.unit_list, strict=True):
        assert first.buffers[0].leaves is second.buffers[0].leaves


def test_a_unit_of_a_flat_tree_takes_its_own_keys_and_no_others_that_begin_alike() -> None:
    params = {path: leaf for path, leaf in PARAMS.items() if path != "blocks.1"}
    plan = fs.make_plan(params, 2, units=["blocks.1"])
    assert plan.units["blocks.1"].structure == ("dict", ("w",), (0,))
    assert [leaf.path for leaf in plan.units[""].leaves] == ["blocks.1-x.w", "blocks.10.w"]
