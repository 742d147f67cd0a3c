"""predict_events: exact prediction of what a step does, from the plan alone."""

import torch

import funcshard as fs


def test_prediction_names_kind_unit_bytes_dtype_and_axis_exactly():
    plan = fs.make_plan({"a": torch.ones(5), "u": {"w": torch.ones(7)}}, {"replicate": 2, "shard": 3}, units=["u"])
    assert fs.predict_events(plan) == (
        fs.Event("all_gather", "", "float32", "float32", 24, "shard", 3),
        fs.Event("all_gather", "u", "float32", "float32", 36, "shard", 3),
        fs.Event("all_gather", "u", "float32", "float32", 36, "shard", 3),
        fs.Event("reduce_scatter", "u", "float32", "float32", 36, "shard", 3),
        fs.Event("reduce_scatter", "", "float32", "float32", 24, "shard", 3),
        fs.Event("all_reduce", "u", "float32", "float32", 12, "replicate", 2),
        fs.Event("all_reduce", "", "float32", "float32", 8, "replicate", 2),
    )


def test_traffic_stays_within_the_bound_of_each_strategy():
    numel, ranks = 1000, 4
    gathers = {"full_shard": 2, "shard_grad_op": 1, "no_shard": 0}
    for strategy, times in gathers.items():
        plan = fs.make_plan({"u": {"w": torch.ones(numel)}}, ranks, units=["u"], strategy=strategy)
        reduced = 2 if strategy == "no_shard" else 1  # an all-reduce is a reduce-scatter and an all-gather
        bound = (times + reduced) * numel * 4 * (ranks - 1) // ranks
        assert sum(event.traffic for event in fs.predict_events(plan)) == bound, strategy
