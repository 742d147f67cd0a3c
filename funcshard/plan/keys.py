"""Which keys of a tree may be in a plan: those that JSON gives back, and that have a path.

A plan is data. Keys of dictionaries and the metadata of custom nodes are in it as they are, and
JSON would give back text in place of bytes, of members of an enum or of dtypes: another plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from funcshard._utils import tree

_DIGITS = 4300  # Python writes no whole number of more digits
_PLAIN = "str, int, bool, finite float, None and tuples of these"


def check_container(kind: str, meta: Any, entries: Sequence[Any], path: str) -> None:
    """Raise unless the keys or metadata of a container come back from JSON as they are.

    Arguments:
        kind: the kind of the container in a structure.
        meta: its metadata there.
        entries: the entries of its children in paths.
        path: its path.

    Raises:
        TypeError: a key or the metadata is no plain data.
        ValueError: a key is empty.
    """
    where = f"at {path!r}" if path else "at the root of the tree"
    if kind in ("dict", "ordered_dict"):
        for key in meta:
            if not _is_data(key):
                raise TypeError(
                    f"the key {_shown(key)} of the dictionary {where} cannot be part of a plan, "
                    f"because JSON does not give it back: keys may be {_PLAIN}; found a "
                    f"{type(key).__name__}, so use its name or number as the key"
                )
    if kind == "custom" and not _is_data(meta[1]):
        raise TypeError(
            f"the node of class {meta[0]} {where} cannot be part of a plan: its metadata "
            f"{_shown(meta[1])} must consist of {_PLAIN}, which JSON gives back; let its flatten "
            "function return names or numbers"
        )
    if any(type(entry) is str and not entry for entry in entries):
        raise ValueError(
            f"a key of the container {where} is empty; a path joins keys with dots: name the key"
        )


def check_paths(paths: Iterable[str]) -> None:
    """Raise ``ValueError`` if a path has an empty key, or too many keys."""
    for path in paths:
        if path.count(".") >= tree.DEEPEST:
            raise ValueError(tree.too_deep(path, "keys in one path"))
        if path and (path[0] == "." or path[-1] == "." or ".." in path):
            raise ValueError(
                f"the leaf at {path!r} has an empty key in its path; a path joins keys with dots, "
                "and no key may be empty or begin or end with a dot: rename the key"
            )


def _is_data(value: Any) -> bool:
    """Return whether JSON gives a value back, of the same class."""
    cls = type(value)
    if cls is tuple:
        return all(map(_is_data, value))
    if cls is int:
        return bool(value.bit_length() < _DIGITS * math.log2(10) - 1)
    return value is None or cls in (str, bool) or (cls is float and math.isfinite(value))


def _shown(value: Any) -> str:
    try:
        shown_text = repr(value)
    except Exception:  # such as a number of too many digits
        return f"of class {type(value).__name__}"
    return shown_text if len(shown_text) < 80 else f"{shown_text[:60]}…"
