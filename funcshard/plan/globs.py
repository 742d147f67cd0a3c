"""Globs of paths, as regular expressions.

``*`` matches any part of one dotted component, and ``**`` any number of components: ``**.w`` is
``w`` at any depth, and ``blocks.**`` is ``blocks`` and all below it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

_PATTERNS = {"**.": r"(?:.*\.)?", ".**": r"(?:\..*)?", "**": ".*", "*": "[^.]*"}


@functools.lru_cache(maxsize=256)
def matcher(glob: str) -> Callable[[str], object]:
    """Return a function from a path to a true value if the path or glob matches it.

    Example:
        >>> from funcshard.plan.globs import matcher
        >>> [path for path in ("w", "a.w", "a.b.w", "a.wx") if matcher("**.w")(path)]
        ['w', 'a.w', 'a.b.w']
    """
    parts = re.split(r"(\*\*\.|\.\*\*|\*\*|\*)", glob)
    pattern = "".join(_PATTERNS.get(part, re.escape(part)) for part in parts)
    return re.compile(pattern, re.DOTALL).fullmatch
