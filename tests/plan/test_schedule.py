"""The schedule, as data."""

import torch

import funcshard as fs


def plan_of(*units):
    return fs.make_plan({"root": torch.ones(2), **{unit: {"w": torch.ones(3)} for unit in units}}, 2, units=list(units))


def test_a_schedule_is_data_that_compares_hashes_and_holds_the_root_first():
    plan = plan_of("a", "b")
    schedule = fs.make_schedule(plan, ["b", "a"], backward_prefetch="post", limit=2)
    assert schedule == fs.Schedule(("", "b", "a"), True, "post", 2)
    assert hash(schedule) == hash(fs.make_schedule(plan, ["", "b", "a"], backward_prefetch="post", limit=2))
    others = [{"order": ["a", "b"]}, {"forward_prefetch": False}, {"backward_prefetch": "pre"}, {"limit": 1}]
    same = {"order": ["b", "a"], "backward_prefetch": "post", "limit": 2}
    assert [fs.make_schedule(plan, **{**same, **other}) == schedule for other in others] == [False] * 4


def test_by_default_the_order_is_the_plans_and_both_prefetches_are_on():
    assert fs.make_schedule(plan_of("b", "a")) == fs.Schedule(("", "b", "a"), True, "pre", 1)
    without_root = fs.make_plan({"a": torch.ones(1)}, 2, units=["a"])
    assert fs.make_schedule(without_root).order == ("a",)
