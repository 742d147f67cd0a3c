"""Objects of users that raise, or lie, when code looks at them; the guards of the library have to survive them."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np


def _raises(*args: Any, **kwargs: Any) -> Any:
    # Why this error: e3nn's Irrep raises it for len() (e3nn/o3/_irreps.py), and a guard let it through.
    raise NotImplementedError("an object of a user answers nothing")


class Raises:
    """An object that raises in every special method that code may ask without knowing its class."""

    __len__ = __eq__ = __iter__ = __bool__ = __hash__ = __dir__ = __contains__ = __getitem__ = __repr__ = _raises

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _raises()


class RaisingTuple(tuple):
    """A tuple whose length and iteration raise, as the length of e3nn's ``Irrep`` does."""

    __len__ = __iter__ = __eq__ = __hash__ = __bool__ = __contains__ = _raises


class RaisingList(list):
    __len__ = __iter__ = __eq__ = __bool__ = __contains__ = _raises


class RaisingDict(dict):
    __len__ = __iter__ = __eq__ = __bool__ = __contains__ = items = values = keys = _raises


class LyingList(list):
    """A list that says that it is longer than it is."""

    def __len__(self) -> int:
        return list.__len__(self) + 7


class LazyMapping(MutableMapping):
    """A mapping that raises an error when its values are read."""

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = _raises


class ReadOnlyLazyMapping(Mapping):
    __getitem__ = __iter__ = __len__ = _raises


@dataclasses.dataclass
class Incomplete:
    """A dataclass without the value of its field."""

    field: Any = dataclasses.field(default=None)

    def __getattribute__(self, name: str) -> Any:
        if name == "field":
            raise RuntimeError("not loaded yet")
        return object.__getattribute__(self, name)


class LyingClass:
    """An object whose ``__class__`` raises, as that of a proxy of nothing does."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("working outside of a context")


def _dead_proxy() -> Any:
    class Short: ...

    return weakref.proxy(Short())


STRANGE: dict[str, Any] = {
    "an object that raises": Raises,
    "a tuple without a length": lambda: RaisingTuple((1, 2)),
    "a list without a length": lambda: RaisingList([1, 2]),
    "a dictionary without a length": lambda: RaisingDict(a=1),
    "a list that lies about its length": lambda: LyingList([1, 2]),
    "a lazy mapping": LazyMapping,
    "a read-only lazy mapping": ReadOnlyLazyMapping,
    "an incomplete dataclass": Incomplete,
    "an array of numpy": lambda: np.arange(3),
    "arrays of numpy in a list": lambda: [np.arange(3), np.arange(2)],
}
"""Functions that make such objects, by the words for them."""

NO_COPY: dict[str, Any] = {"a proxy of a dead object": _dead_proxy, "an object without a class": LyingClass}
"""The same for objects that ``copy.deepcopy`` cannot copy."""
