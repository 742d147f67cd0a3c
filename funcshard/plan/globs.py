"""Globs of paths. The time of a match grows with the lengths of glob and path, for every glob.

``*`` matches any part of one dotted component, and ``**`` any number of components: ``**.w`` is
``w`` at any depth, and ``blocks.**`` is ``blocks`` and all below it. A regular expression with
several stars would try every way to share the path among them, and not end for some globs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable


@functools.lru_cache(maxsize=256)
def matcher(glob: str) -> Callable[[str], bool]:
    """Return a function from a path to whether a path or glob matches it.

    Example:
        >>> from funcshard.plan.globs import matcher
        >>> [path for path in ("w", "a.w", "a.b.w", "a.wx") if matcher("**.w")(path)]
        ['w', 'a.w', 'a.b.w']
    """
    parts = [part for part in re.split(r"(\*\*\.|\.\*\*|\*\*|\*)", glob) if part]
    stars = [part for part in parts if part in _STEPS]
    if len(stars) <= 1:  # a regular expression is quick, and tries one way only
        pattern = re.compile(
            "".join(_PATTERNS.get(part, re.escape(part)) for part in parts), re.DOTALL
        )
        return lambda path: pattern.fullmatch(path) is not None
    begin = parts[0] if parts[0] not in _STEPS else ""
    end = parts[-1] if parts[-1] not in _STEPS else ""

    def matches(path: str) -> bool:
        if not (path.startswith(begin) and path.endswith(end)):
            return False
        # Bit i of ``ends``: the parts so far match the first i characters of the path.
        ends, dots, size = 1, _occurrences(".", path), len(path)
        for part in parts:
            step = _STEPS.get(part)
            ends = (
                (ends & _occurrences(part, path)) << len(part)
                if step is None
                else step(ends, dots, size)
            )
            if not ends:
                return False
        return bool(ends >> size & 1)

    return matches


def _occurrences(text: str, path: str) -> int:
    """Return a number with bit i set if ``text`` is in ``path`` from character i on."""
    occurrence_bits, at = 0, path.find(text)
    while at >= 0:
        occurrence_bits |= 1 << at
        at = path.find(text, at + 1)
    return occurrence_bits


def _from_first(ends: int, size: int) -> int:
    """Return all bits up to ``size``, from the lowest one of ``ends`` on."""
    return (2 << size) - (ends & -ends) if ends else 0


def _component(ends: int, dots: int, size: int) -> int:
    # The carry of a sum runs through neighbours that are no dots.
    others = ((1 << size) - 1) & ~dots
    return ends | (((ends & others) + others) ^ others)


def _any(ends: int, dots: int, size: int) -> int:
    return _from_first(ends, size)


def _components_before(ends: int, dots: int, size: int) -> int:
    return ends | (_from_first(ends, size) & dots) << 1


def _components_after(ends: int, dots: int, size: int) -> int:
    return ends | _from_first((ends & dots) << 1, size)


_STEPS: dict[str, Callable[[int, int, int], int]] = {
    "*": _component, "**": _any, "**.": _components_before, ".**": _components_after,
}  # fmt: skip
_PATTERNS = {"**.": r"(?:.*\.)?", ".**": r"(?:\..*)?", "**": ".*", "*": "[^.]*"}
