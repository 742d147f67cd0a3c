"""Names of the sizes that may change stand in one text, or in a tree in the form of the batch."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from funcshard._utils import tree
from funcshard.graph.signatures import Conditions, NamedSizes, sizes_of

Pair = namedtuple("Pair", "x y")
X, Y, FLAGS = torch.ones(4, 6), torch.ones(4), torch.ones(())

FOUND: dict[str, tuple[Any, Any, list[Any], dict[str, int]]] = {
    "one text": ("b, ...", X, [("b", None)], {"b": 4}),
    "two names": ("b, t", X, [("b", "t")], {"b": 4, "t": 6}),
    "a fixed dim": ("_, t", X, [(None, "t")], {"t": 6}),
    "all tensors": ("b, ...", {"y": Y, "x": X, "n": 3}, [("b", None), ("b",)], {"b": 4}),
    "a tree": ({"x": "b, t", "y": "b", "f": None}, {"x": X, "y": Y, "f": FLAGS}, [("b", "t"), ("b",)], {"b": 4, "t": 6}),
    "a prefix of a tree": (["b, ...", None], ({"a": X, "c": Y}, FLAGS), [("b", None), ("b",)], {"b": 4}),
    "a named tuple": (("b, ...", None), Pair(X, FLAGS), [("b", None)], {"b": 4}),
    "nothing": (None, X, [], {}),
}


def found(spec: Any, batch: Any) -> tuple[list[Any], dict[str, int]]:
    leaves, form = tree.flatten_with_form(({"w": torch.ones(2)}, batch))
    names = NamedSizes(spec).of(leaves, form)
    return list(names.values()), sizes_of(leaves, names)


@pytest.mark.parametrize("case", FOUND)
def test_dims_have_the_names_of_the_text(case: str) -> None:
    spec, batch, names, sizes = FOUND[case]
    assert found(spec, batch) == (names, sizes)


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "a number": ("4, ...", X, "names the sizes that may change.*found '4, ...'"),
    "a keyword": ("for", Y, "found 'for'"),
    "dots in front": ("..., b", X, "found '..., b'"),
    "an empty text": ("", X, "found ''"),
    "more names than dims": ("b, t, c", X, r"names 3 dims; found a tensor of shape \[4, 6\]"),
    "fewer names than dims": ("b", X, r"names 1 dims; found a tensor of shape \[4, 6\].*'...' for further dims"),
    "a tensor without dims": ("b, ...", (X, FLAGS), r"a tensor of shape \[\] in the batch: pass a tree"),
    "other keys": ({"z": "b"}, {"x": Y}, "found another form at `batch`"),
    "another length": (["b", "b"], (Y,), "found another form at `batch`"),
    "a number in a tree": ({"x": 0}, {"x": X}, r"found another form at `batch\['x'\]`"),
    "one name for two sizes": ("b, b", X, "the sizes 4 and 6 in the batch: give them two names"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_texts_are_refused_in_words(case: str) -> None:
    spec, batch, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        found(spec, batch)


# --- conditions: arithmetic and comparisons of sizes, and no other code -----------------------------

HOLDS = {
    "a remainder": ("(b % 2) == 0", {"b": 4}, {"b": 5}),
    "a part": ("(2*(b // 2)) == b", {"b": 6}, {"b": 7}),
    "two names": ("b != t and b < t", {"b": 2, "t": 3}, {"b": 3, "t": 3}),
    "one of two": ("b == 4 or t == 1", {"b": 4, "t": 2}, {"b": 5, "t": 2}),
    "a chain": ("2 <= b <= 8", {"b": 8}, {"b": 9}),
    "a function": ("max(b, 3) == -(-b)", {"b": 3}, {"b": 2}),
    "a size with the name of a function": ("max(max, 3) == max", {"b": 2, "max": 3}, {"b": 2, "max": 2}),
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
    with pytest.raises(ValueError, match="which isn't a comparison of sizes"):
        Conditions((text,))
