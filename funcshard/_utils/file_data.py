"""Check data that came from a file, before it's used: types, ranges, keys, depth.

A file may be damaged, or made to do harm. A function returns the part's value, or raises a
``ValueError`` with its name; the caller adds the file and what to do.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sized
from typing import Any

MOST = 2**63 - 1  # the largest number of elements or bytes that torch counts
_LONG = 10**60
_DEEPEST = 500  # levels; the functions that walk a tree call themselves on each


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
        parsed_data = json.loads(
            data.decode() if isinstance(data, bytes) else data, object_pairs_hook=_without_doubles
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no text in UTF-8, because of the byte at {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error}") from None
    except RecursionError:
        raise ValueError(_too_deep()) from None
    check_depth(parsed_data)
    return parsed_data


def check_depth(data: Any) -> None:
    """Raise ``ValueError`` if lists and dictionaries are nested too deeply."""
    # Level by level, because a function that called itself would fail at the depth it looks for.
    level_nodes = [data]
    for _ in range(_DEEPEST):
        if not level_nodes:
            return
        level_nodes = [
            child
            for node in level_nodes
            if isinstance(node, list | dict)
            for child in (node if isinstance(node, list) else node.values())
            if isinstance(child, list | dict)
        ]
    if level_nodes:
        raise ValueError(_too_deep())


def _too_deep() -> str:
    return f"it is nested in more than {_DEEPEST} levels"


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique_pairs = dict(pairs)
    if len(unique_pairs) < len(pairs):
        key_uses = Counter(key for key, _ in pairs)
        raise ValueError(
            f"it has the key {max(key_uses, key=key_uses.__getitem__)!r} twice in one object"
        )
    return unique_pairs


def whole(name: str, value: Any, least: int = 0, most: int = MOST) -> int:
    """Return a whole number between bounds."""
    # Why the type: True is an int for isinstance.
    if type(value) is not int or not least <= value <= most:
        raise _error(name, f"a whole number from {least} to {most}", value)
    return value


def text(name: str, value: Any) -> str:
    """Return a text."""
    if type(value) is not str:
        raise _error(name, "a text", value)
    return value


def flag(name: str, value: Any) -> bool:
    """Return a truth value."""
    if type(value) is not bool:
        raise _error(name, "true or false", value)
    return value


def listed(name: str, value: Any, length: int | None = None) -> list[Any]:
    """Return a list, maybe of a given length."""
    if type(value) is not list or length not in (None, len(value)):
        raise _error(name, "a list" if length is None else f"a list of {length}", value)
    return value


def numbers(name: str, value: Any, least: int = 0, most: int = MOST) -> tuple[int, ...]:
    """Return a list of whole numbers between bounds, as a tuple."""
    if type(value) is not list or not all(
        type(item) is int and least <= item <= most for item in value
    ):
        raise _error(name, f"a list of whole numbers from {least} to {most}", value)
    return tuple(value)


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Return a list of texts, as a tuple."""
    if type(value) is not list or not all(type(item) is str for item in value):
        raise _error(name, "a list of texts", value)
    return tuple(value)


def table(
    name: str,
    value: Any,
    keys: Collection[str] = (),
    later: Collection[str] = (),
    *,
    others: bool = True,
) -> dict[str, Any]:
    """Return a dictionary with ``keys``; it may have those of ``later``, and any if ``others``."""
    if type(value) is not dict:
        raise _error(name, "an object", value)
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
    file_name = text(name, value)
    if file_name in ("", ".", "..") or any(sign in file_name for sign in "/\\\0"):
        raise _error(name, "the name of a file in the same folder", value)
    return file_name


def shown(value: Any) -> str:
    """Return the beginning of a value's text, in a time that doesn't grow with the value."""
    plain_types = {int, str, bool}
    shown_text = f"a {type(value).__name__}"
    if type(value) in (str, bytes):
        shown_text = repr(value[:60])
    elif type(value) is int and abs(value) > _LONG:
        shown_text = "a number of more than 60 digits"
    elif value is None or type(value) in (bool, int, float):
        shown_text = repr(value)
    elif isinstance(value, list | tuple) and len(value) < 10 and {*map(type, value)} <= plain_types:
        shown_text = f"[{', '.join(map(shown, value))}]"
    elif isinstance(value, Sized):
        shown_text += f" of {len(value)}"
    if len(shown_text) > 120:
        return f"{shown_text[:120]} …"
    return shown_text


def _error(name: str, rule: str, value: Any) -> ValueError:
    return ValueError(f"{name} must be {rule}; found {shown(value)}")
