"""What the machines of a schedule answer to a program that follows, leaves or repeats it."""

from __future__ import annotations

import pytest

from funcshard.plan.schedule import BackwardOrder, ForwardOrder, Schedule


def forward(order: str, calls: str, *, ahead: bool = True, limit: int = 1, stays: str = "", **options) -> list[str]:
    """Drive a ``ForwardOrder``; return, for each call, the gathers before it and ahead of others, and whether it is kept."""
    machine = ForwardOrder(Schedule(tuple(order), ahead, "pre", limit), **options)
    found = []
    for name in calls:
        gathers, kept, ahead_names = machine.call(name, stays=name in stays)
        now = name if gathers else ""
        then = " ".join(ahead_names)
        found.append(f"{now or '-'} > {then or '-'}{' kept' if kept else ''}")
    assert machine.ran == list(calls)
    return found


FORWARD = {
    "one ahead": (("abc", "abc"), {}, ["a > b", "- > c", "- > -"]),
    "two ahead": (("abcd", "abcd"), {"limit": 2}, ["a > b c", "- > d", "- > -", "- > -"]),
    "on demand": (("abc", "abc"), {"ahead": False}, ["a > -", "b > -", "c > -"]),
    "another order": (("abc", "acb"), {}, ["a > b", "c > -", "- > -"]),
    "an unknown order": (("abc", "abc"), {"follows": False}, ["a > -", "b > -", "c > -"]),
    "a second time": (("abcb", "abcb"), {}, ["a > b", "- > c", "- > b", "- > -"]),
    "kept for its next call": (("aba", "aba"), {"stays": "a"}, ["a > b kept", "- > -", "- > -"]),
    "kept only if it may come again": (("ab", "ab"), {"stays": "ab"}, ["a > b", "- > -"]),
    "kept without an order": (("", "aaa"), {"stays": "a", "follows": False}, ["a > -", "a > - kept", "- > - kept"]),
}


@pytest.mark.parametrize(("programs", "options", "wanted"), FORWARD.values(), ids=FORWARD)
def test_forward(programs, options, wanted):
    assert forward(*programs, **options) == wanted


def backward(units: str, *, reaches=lambda use: True, on_demand=(), limit: int = 1) -> list[str]:
    """Drive a ``BackwardOrder`` over uses 0, 1, ... of ``units``; return the gathers at and ahead of each."""
    schedule = Schedule(tuple(units), True, "pre", limit, on_demand)
    machine = BackwardOrder(schedule)
    machine.uses = [(use, use, name) for use, name in enumerate(units)]
    found = []
    for use in range(len(units)):
        if reaches(use):
            now = units[use] if machine.reach(use) else ""
            then = " ".join(units[ahead] for ahead in machine.prefetch(use, reaches=reaches))
            machine.gathered.discard(use)
            found.append(f"{now or '-'} > {then or '-'}")
    return found


BACKWARD = {
    "one ahead": ({}, ["d > c", "- > b", "- > a", "- > -"]),
    "two ahead": ({"limit": 2}, ["d > c b", "- > a", "- > -", "- > -"]),
    "one on demand": ({"on_demand": ("c",)}, ["d > -", "c > b", "- > a", "- > -"]),
    "one that backward does not reach": ({"reaches": lambda use: use != 1}, ["d > b", "- > a", "- > -"]),
}


@pytest.mark.parametrize(("options", "wanted"), BACKWARD.values(), ids=BACKWARD)
def test_backward(options, wanted):
    assert backward("dcba", **options) == wanted
