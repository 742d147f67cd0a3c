"""Globs: what they match, and that they end."""

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import funcshard as fs
from funcshard.plan.globs import matcher

PATHS = ["", "w", "a", "a.w", "a.b", "a.b.w", "a.bw", "ab.w", "b.a.b.w", "b.a.w", "blocks.10.w"]

# glob -> the paths of PATHS that it matches
GLOBS = {
    "": [""],
    "a": ["a"],
    "*": ["", "w", "a"],
    "**": PATHS,
    "*.*": ["a.w", "a.b", "a.bw", "ab.w"],
    "**.w": ["w", "a.w", "a.b.w", "ab.w", "b.a.b.w", "b.a.w", "blocks.10.w"],
    "a.**": ["a", "a.w", "a.b", "a.b.w", "a.bw"],
    "a.*.w": ["a.b.w"],
    "**.a.**": ["a", "a.w", "a.b", "a.b.w", "a.bw", "b.a.b.w", "b.a.w"],
    "**.*b.*": ["a.b.w", "ab.w", "b.a.b.w"],
    "*b*": [],
    "*b*.w": ["ab.w"],
    "**b**": ["a.b", "a.b.w", "a.bw", "ab.w", "b.a.b.w", "b.a.w", "blocks.10.w"],
    "blocks.*.*": ["blocks.10.w"],
    "*.1*.*": ["blocks.10.w"],
}


@pytest.mark.parametrize(("glob", "matched"), GLOBS.items(), ids=map(repr, GLOBS))
def test_a_glob_matches_these_paths(glob: str, matched: list[str]) -> None:
    assert [path for path in PATHS if matcher(glob)(path)] == matched


def as_pattern(glob: str) -> re.Pattern[str]:
    """Return the regular expression that says what a glob means."""
    meaning = {"**.": r"(?:.*\.)?", ".**": r"(?:\..*)?", "**": ".*", "*": "[^.]*"}
    parts = (meaning.get(part, re.escape(part)) for part in re.split(r"(\*\*\.|\.\*\*|\*\*|\*)", glob))
    return re.compile("".join(parts), re.DOTALL)


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=120)
@given(st.lists(st.sampled_from(["a", "b", ".", "*", "**", "**.", ".**"]), max_size=8).map("".join))
def test_a_glob_means_the_same_as_its_regular_expression(glob: str) -> None:
    pattern, matched = as_pattern(glob), matcher(glob)
    for size in range(6):
        for path in map("".join, itertools.product("ab.", repeat=size)):
            assert matched(path) == (pattern.fullmatch(path) is not None), (glob, path)


@pytest.mark.parametrize("glob", ["*a" * 25 + "b", "**." * 12 + "nope", "**a" * 25 + "b", "a" + ".**" * 12 + ".nope"])
@pytest.mark.parametrize("path", ["a" * 60, ".".join("a" * 60)], ids=["one key", "many keys"])
def test_a_glob_of_many_stars_that_matches_nothing_ends(glob: str, path: str) -> None:
    assert not matcher(glob)(path)
    with pytest.raises(ValueError, match="matches no part of the tree"):
        fs.make_plan({path: torch.zeros(1)}, 1, units=[glob])


def test_a_glob_of_many_stars_finds_what_it_matches() -> None:
    assert matcher("*a" * 25)("a" * 60)
    assert matcher("**." * 12 + "a")(".".join("a" * 60))
