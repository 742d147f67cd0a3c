"""A name from a file finds classes of loaded modules alone, and runs nothing on the way."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from typing import Any

import pytest

import funcshard as fs
from funcshard._utils.tree import loaded_class


class _Outer:
    class Inner:
        """A class inside of another one."""

    value = print


@pytest.mark.parametrize(
    "name",
    [
        None, 3, [], "", ":", "os", "os:", "os:system", "os:path.join", "os:path.genericpath.os", "funcshard:plan.Plan",
        f"{__name__}:_Outer.value", f"{__name__}:_Outer.value.__self__", f"{__name__}:_Outer.missing", "not_loaded:Thing",
        f"{__name__}:_Outer.__class__", f"{__name__}:fs.Plan",
    ],
)  # fmt: skip
def test_what_is_no_class_of_a_loaded_module_is_not_found(name: Any) -> None:
    assert loaded_class(name) is None


def test_classes_are_found_by_their_names() -> None:
    assert loaded_class("collections:OrderedDict") is OrderedDict
    assert loaded_class(f"{__name__}:_Outer.Inner") is _Outer.Inner
    assert loaded_class("funcshard:TrainState") is fs.TrainState


def test_nothing_is_computed_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            pytest.fail(f"{name} would be imported")

    class Proxy:
        @property
        def __class__(self) -> Any:
            pytest.fail("the class would be computed")

    lazy = Lazy("lazy")
    object.__getattribute__(lazy, "__dict__").update(proxy=Proxy(), Thing=_Outer)
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    assert loaded_class("lazy:proxy") is None
    assert loaded_class("lazy:other") is None
    assert loaded_class("lazy:Thing") is _Outer
