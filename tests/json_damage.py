"""Every small change of JSON data: files that anybody may have written must be read or be an error."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

__all__ = ["changed_once"]

_JUNK = (None, True, -1, 3, 2**70, 0.5, "x", "", [], {}, [[]], {"x": 1})


def changed_once(data: Any, most: int) -> Iterator[tuple[str, Any]]:
    """Yield copies of JSON data that differ at one node, with words that say where and how.

    A node becomes junk or another node of the data, goes, or comes twice.

    Arguments:
        data: lists, dictionaries, texts, numbers, bools and ``None``.
        most: the number of copies; the same ones in every run.
    """
    places = list(_places(data, ()))
    drawn = random.Random(0)
    for number in range(most):
        place = places[number] if number < len(places) else drawn.choice(places)
        damaged = copy.deepcopy(data)
        parent = damaged
        for key in place[:-1]:
            parent = parent[key]
        how = drawn.choice(["junk", "junk", "junk", "another", "gone", "twice"])
        if how == "gone":
            del parent[place[-1]]
        elif how == "twice" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[place[-1]]))
        else:
            other = data
            for key in drawn.choice(places):
                other = other[key]
            how, value = ("another", copy.deepcopy(other)) if how != "junk" else ("junk", drawn.choice(_JUNK))
            parent[place[-1]] = value
        yield f"{'.'.join(map(str, place))}: {how}", damaged


def _places(data: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from _places(value, (*path, key))
