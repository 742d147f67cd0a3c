"""Check data that came from a file, before it's used: types, ranges, keys, depth.

A file may be damaged, or made to do harm. A function returns the part's value, or raises a
``ValueError`` with its name; the caller adds the file and what to do.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Collection
from typing import Any, TypeVar

T = TypeVar("T")

MOST = 2**63 - 1  # the largest number of elements or bytes that torch counts
_DEEPEST = 500  # levels; the functions that walk a tree call themselves on each
_TOO_DEEP = f"it is nested in more than {_DEEPEST} levels"
_TITLES: dict[type, str] = {
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def parse(data: str | bytes) -> Any:
    """Return the values of JSON.

    Raises:
        TypeError: the data is neither text nor bytes.
        ValueError: it's no JSON in UTF-8, has a key twice, or is nested too deeply.
    """
    if not isinstance(data, str | bytes):
        raise TypeError(
            f"JSON must be text or bytes; found {type(data).__name__}: pass the contents of the "
            "file"
        )
    try:
        json_text = data.decode() if isinstance(data, bytes) else data
        parsed_data = json.loads(json_text, object_pairs_hook=_without_doubles)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"it isn't text in UTF-8, because of the byte at {error.start}"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    # Level by level, because a function that called itself would fail at the depth it looks for.
    level_nodes = [parsed_data]
    for _ in range(_DEEPEST):
        level_nodes = [
            child
            for node in level_nodes
            if isinstance(node, list | dict)
            for child in (node if isinstance(node, list) else node.values())
        ]
        if not level_nodes:
            return parsed_data
    raise ValueError(_TOO_DEEP)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique_pairs = dict(pairs)
    if len(unique_pairs) < len(pairs):
        ((double_key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {double_key!r} twice in one object")
    return unique_pairs


def whole(name: str, value: Any) -> int:
    """Return a whole number of elements or bytes."""
    # Why the type: True is an int for isinstance.
    if type(value) is not int or not 0 <= value <= MOST:
        raise _error(name, f"a whole number from 0 to {MOST}", value)
    return value


def of_type(cls: type[T], name: str, value: Any) -> T:
    """Return a text, a truth value, a list or a dictionary."""
    if type(value) is not cls:
        raise _error(name, _TITLES[cls], value)
    return value


def table(
    name: str,
    value: Any,
    keys: Collection[str] = (),
    later: Collection[str] = (),
    *,
    others: bool = True,
) -> dict[str, Any]:
    """Return a dictionary with ``keys``; it may have those of ``later``, and any if ``others``."""
    of_type(dict, name, value)
    for key in keys:
        if key not in value:
            raise ValueError(f"{name} must have {key!r}; found {shown(sorted(value))}")
    unknown_keys = () if others else value.keys() - {*keys, *later}
    if unknown_keys:
        raise ValueError(
            f"{name} must have no other keys than it is written with; found {min(unknown_keys)!r}"
        )
    return value


def own_name(name: str, value: Any) -> str:
    """Return the name of a file that lies in a folder itself."""
    file_name = of_type(str, name, value)
    if file_name in ("", ".", "..") or any(sign in file_name for sign in "/\\\0"):
        raise _error(name, "the name of a file in the same folder", value)
    return file_name


def shown(value: Any) -> str:
    """Return the beginning of a value's text, in a time that doesn't grow with the value."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of more digits than Python shows
        return f"a {type(value).__name__}"


def _error(name: str, rule: str, value: Any) -> ValueError:
    return ValueError(f"{name} must be {rule}; found {shown(value)}")
