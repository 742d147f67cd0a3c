"""Which paths a glob matches."""

import pytest

from funcshard.plan.unit_options import matcher

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
