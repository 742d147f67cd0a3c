"""Conditions on sizes are data: arithmetic and comparisons, and no other code."""

from __future__ import annotations

import pytest

from funcshard.graph.conditions import Conditions

HOLDS = {
    "a remainder": ("(b % 2) == 0", {"b": 4}, {"b": 5}),
    "a part": ("(2*(b // 2)) == b", {"b": 6}, {"b": 7}),
    "two names": ("b != t and b < t", {"b": 2, "t": 3}, {"b": 3, "t": 3}),
    "one of two": ("b == 4 or t == 1", {"b": 4, "t": 2}, {"b": 5, "t": 2}),
    "a chain": ("2 <= b <= 8", {"b": 8}, {"b": 9}),
    "a function": ("max(b, 3) == -(-b)", {"b": 3}, {"b": 2}),
    "a negation": ("not b == 4", {"b": 3}, {"b": 4}),
    "a quotient": ("b/2 - 1 == 1.0", {"b": 4}, {"b": 5}),
    "a sum": ("b + t*2 >= 8", {"b": 4, "t": 2}, {"b": 3, "t": 2}),
}


@pytest.mark.parametrize("case", HOLDS)
def test_a_condition_holds_for_the_sizes_that_fulfil_it(case: str) -> None:
    text, fulfil, fail = HOLDS[case]
    conditions = Conditions(("b > 1", text), ("", "train.py, line 3"))
    assert conditions.failing(fulfil) == ""
    assert conditions.failing(fail) == f"{text} (train.py, line 3)"
    assert Conditions((text,)).failing(fail) == text


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "b.real", "b**b", "[b]", "open(b)", "max()", "max(b, key=b)", "b if t else b", "(lambda: b)()",
     "b[0]", "'b'", "b ==", "b; t", "(" * 900, "b + " * 900 + "b", "1 is b"],
)  # fmt: skip
def test_other_code_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="which is no comparison of sizes"):
        Conditions((text,))
