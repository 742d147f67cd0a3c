"""Names in a flattened state: a recorded class is found only in a module that is loaded."""

from __future__ import annotations

import sys
import types

import pytest

import funcshard as fs
from funcshard.checkpoint.stored_state import check_replicated, find_class, join, shortened


@pytest.mark.parametrize("name", ["os:system", "not_loaded:Thing", "funcshard.parts:Nothing", "os:path.join"])
def test_only_classes_of_loaded_modules_are_found(name: str) -> None:
    with pytest.raises(ValueError, match="top level of the loaded module"):
        find_class(name)
    assert find_class("funcshard.parts:PerRank") is fs.PerRank


def test_long_values_that_differ_are_shown_around_their_difference() -> None:
    one, other = "a" * 5000 + "x" + "b" * 5000, "a" * 5000 + "y" + "b" * 5000
    summaries = [{"values": {"config": value}, "tensors": {}, "structure": ""} for value in (one, other)]
    with pytest.raises(
        ValueError, match=r"'config' of the state is …a+xb+… on rank 0 and …a+yb+… on rank 1: mark"
    ) as caught:
        check_replicated(summaries)
    assert len(str(caught.value)) < 300
    assert shortened("abc", "abd") == ("'abc'", "'abd'")
    assert shortened([1] * 50, [1] * 51)[1].startswith("…")


def test_finding_a_class_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = types.ModuleType("lazy")
    lazy.__getattr__ = lambda name: pytest.fail(f"{name} would be imported")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    with pytest.raises(ValueError, match="the state contains a Thing, so that class must be at the top level"):
        find_class("lazy:Thing")


def test_join_leaves_out_what_is_empty() -> None:
    assert join("", "a.b", "", "c") == "a.b.c"
