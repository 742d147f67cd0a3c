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


def test_a_printed_schedule_says_what_is_gathered_next_to_what():
    text = str(fs.make_schedule(plan_of("a", "b"), ["b", "a"]))
    title, _, *rows = [" ".join(line.split()) for line in text.splitlines() if set(line) - set("- ─")]
    assert title == "Schedule of 3 units: forward prefetch on, backward prefetch pre, at most 1 ahead"
    assert rows == ["0 (root) b", "1 b a", "2 a b"]
    repeated = str(fs.make_schedule(plan_of("a", "b"), ["a", "a", "b", "a"]))
    rows = [" ".join(line.split()) for line in repeated.splitlines() if line[:1].isdigit()]
    assert rows == ["0 (root) a", "1 a a", "2 a b a", "3 b a a", "4 a b"]
    off = str(fs.make_schedule(plan_of("a"), forward_prefetch=False, backward_prefetch=None))
    assert "forward prefetch off, backward prefetch off" in off
