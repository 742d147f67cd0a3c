"""The schedule, as data."""

import torch

import funcshard as fs


def plan_of(*units):
    return fs.make_plan({"root": torch.ones(2), **{unit: {"w": torch.ones(3)} for unit in units}}, 2, units=list(units))


def test_by_default_the_order_is_the_plans_and_both_prefetches_are_on():
    assert fs.make_schedule(plan_of("b", "a")) == fs.Schedule(("", "b", "a"), True, "pre", 1)
    without_root = fs.make_plan({"a": torch.ones(1)}, 2, units=["a"])
    assert fs.make_schedule(without_root).order == ("a",)
