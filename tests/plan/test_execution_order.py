"""The order of a call, machine by machine: what each answers to a program that follows, leaves or repeats the schedule."""

from __future__ import annotations

import pytest

from funcshard.plan.execution_order import BackwardOrder, ForwardOrder, ReduceOrder
from funcshard.plan.schedule import Schedule

BUCKET = dict.fromkeys("bc", ("b", "c"))


def forward(order: str, calls: str, *, ahead: bool = True, limit: int = 1, stays: str = "", **options) -> list[str]:
    """Drive a ``ForwardOrder``; return, for each call, the gathers before it and ahead of others, and whether it is kept."""
    machine = ForwardOrder(Schedule(tuple(order), ahead, "pre", limit), options.pop("buckets", {}), **options)
    found = []
    for name in calls:
        now = "+".join(machine.gather(name))
        kept = machine.call(name, stays=name in stays)
        then = " ".join("+".join(names) for names in machine.prefetch())
        found.append(f"{now or '-'} > {then or '-'}{' kept' if kept else ''}")
    assert machine.ran == list(calls)
    return found


FORWARD = {
    "one ahead": (("abc", "abc"), {}, ["a > b", "- > c", "- > -"]),
    "two ahead": (("abcd", "abcd"), {"limit": 2}, ["a > b c", "- > d", "- > -", "- > -"]),
    "on demand": (("abc", "abc"), {"ahead": False}, ["a > -", "b > -", "c > -"]),
    "another order": (("abc", "acb"), {}, ["a > b", "c > -", "- > -"]),
    "an unknown order": (("abc", "abc"), {"known": False}, ["a > -", "b > -", "c > -"]),
    "a bucket comes with its first": (("abcd", "abcd"), {"buckets": BUCKET}, ["a > b+c", "- > -", "- > d", "- > -"]),
    "a second time by itself": (("abcb", "abcb"), {"buckets": BUCKET}, ["a > b+c", "- > -", "- > b", "- > -"]),
    "kept for its next call": (("aba", "aba"), {"stays": "a"}, ["a > b kept", "- > -", "- > -"]),
    "kept only if it may come again": (("ab", "ab"), {"stays": "ab"}, ["a > b", "- > -"]),
    "kept without an order": (("", "aaa"), {"stays": "a", "known": False}, ["a > -", "a > - kept", "- > - kept"]),
}


@pytest.mark.parametrize(("programs", "options", "wanted"), FORWARD.values(), ids=FORWARD)
def test_forward(programs, options, wanted):
    assert forward(*programs, **options) == wanted


def backward(units: str, *, reaches=lambda use: True, buckets=None, on_demand=(), limit: int = 1) -> list[str]:
    """Drive a ``BackwardOrder`` over uses 0, 1, ... of ``units``; return the gathers at and ahead of each."""
    schedule = Schedule(tuple(units), True, "pre", limit, on_demand)
    machine = BackwardOrder(schedule, buckets or {}, units, reaches)
    machine.expect([(use, use) for use in range(len(units))])
    found = []
    for use in range(len(units)):
        if reaches(use):
            now = "+".join(units[each] for each in machine.gather(use))
            machine.reach(use)
            then = " ".join("+".join(units[each] for each in uses) for uses in machine.prefetch(use))
            machine.release(use)
            found.append(f"{now or '-'} > {then or '-'}")
    return found


BACKWARD = {
    "one ahead": ({}, ["d > c", "- > b", "- > a", "- > -"]),
    "two ahead": ({"limit": 2}, ["d > c b", "- > a", "- > -", "- > -"]),
    "one on demand": ({"on_demand": ("c",)}, ["d > -", "c > b", "- > a", "- > -"]),
    "one that backward does not reach": ({"reaches": lambda use: use != 1}, ["d > b", "- > a", "- > -"]),
    "a bucket": ({"buckets": BUCKET}, ["d > b+c", "- > -", "- > a", "- > -"]),
}


@pytest.mark.parametrize(("options", "wanted"), BACKWARD.values(), ids=BACKWARD)
def test_backward(options, wanted):
    assert backward("dcba", **options) == wanted


def test_backward_gathers_again_after_a_release_and_first_of_all_what_it_reaches_first():
    machine = BackwardOrder(Schedule(("a", "b"), True, "pre", 1), {}, "ba")
    machine.expect([(0, 0), (1, 1)])
    assert machine.prefetch(-1, most=1) == [[0]]
    assert machine.gather(0) == []
    machine.reach(0)
    assert machine.prefetch(-1, most=1) == [[1]]  # what is in use is not gathered
    machine.release(0)
    assert machine.gather(0) == [0]


def reduced(expected: str, gradients: str, bucket: str | None = "bucket") -> list[str]:
    """Drive a ``ReduceOrder``; return the members of each group, those that remain at the end behind a bar."""
    machine: ReduceOrder[str, str, int] = ReduceOrder()
    for member in expected:
        machine.expect(member, bucket)
    groups = []
    for number, member in enumerate(gradients):
        machine.arrive(member)
        groups += ["".join(group) for group in machine.reduce(member, bucket, number)]
    machine.end()
    return groups + ["|" + "".join(group) for group in machine.rest()]


REDUCE = {
    "alone": (("ab", "ba", None), ["b", "a"]),
    "together with the last": (("abc", "cab"), ["cab"]),
    "a second gradient by itself": (("ab", "aab"), ["a", "ab"]),
    "twice expected": (("abab", "baba"), ["ba", "ba"]),
    "one that never comes": (("abc", "ca"), ["|ca"]),
}


@pytest.mark.parametrize(("program", "wanted"), REDUCE.values(), ids=REDUCE)
def test_reductions(program, wanted):
    assert reduced(*program) == wanted


def test_more_gradients_of_a_member_are_expected_until_the_last_has_come():
    machine: ReduceOrder[str, str, int] = ReduceOrder()
    for _ in range(2):
        machine.expect("a", None)
    assert [machine.arrive("a") for _ in range(2)] == [True, False]


def test_what_a_backward_did_not_bring_is_not_awaited_in_the_next_one():
    order = ReduceOrder()
    order.expect("a", None)
    order.expect("a", None)
    assert order.arrive("a")  # one more may come
    order.end()
    order.expect("a", None)
    assert not order.arrive("a")
