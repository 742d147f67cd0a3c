"""Find nodes of a parameter tree by path or glob.

In a glob, ``*`` matches any part of one dotted component, and ``**`` matches any number of
components.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from funcshard._utils import tree

__all__ = ["match", "match_pairs", "some"]


def match(globs: Iterable[str], uses: Sequence[tuple[str, ...]], noun: str) -> list[str]:
    """Return the nodes of a tree that match ``globs``.

    Arguments:
        globs: paths or globs.
        uses: the paths of each leaf of the tree; a tied leaf has several.
        noun: the word for a glob in error messages, such as ``"unit"``.

    Raises:
        TypeError: ``globs`` is not a list of strings.
        ValueError: a glob matches no node, or two globs match the same node.
    """
    return [node for _, node in match_pairs(globs, uses, noun)]


def match_pairs(globs: Iterable[str], uses: Sequence[tuple[str, ...]], noun: str) -> list[tuple[str, str]]:
    """Return pairs of a glob and a node that it matches; see ``match``."""
    if isinstance(globs, str):
        raise TypeError(f"{noun}s must be a list of paths or globs; found the string {globs!r}: write [{globs!r}]")
    if not isinstance(globs, Iterable):
        hint = ": apply a policy to the module, as in units=policy(module)" if callable(globs) else ""
        raise TypeError(f"{noun}s must be a list of paths or globs; found {globs!r}{hint}")
    nodes: dict[str, None] = {}
    for path in (path for paths in uses for path in paths):
        parts = path.split(".")
        nodes.update(dict.fromkeys(".".join(parts[:n]) for n in range(1, len(parts) + 1)))
    candidates = sorted(nodes, key=tree.natural_key)
    chosen: dict[str, str] = {}
    for glob in globs:
        if not isinstance(glob, str):
            raise TypeError(f"{noun}s must be a list of paths or globs; found {glob!r} in it")
        pattern = _pattern(glob)
        found = [node for node in candidates if pattern.fullmatch(node)]
        if not found and glob != "":
            raise ValueError(
                f"{noun} {glob!r} matches no part of the tree; {noun}s are paths or globs of nodes that hold leaves, such "
                f"as {some(candidates)}"
            )
        for name in found:
            if name in chosen:
                raise ValueError(
                    f"{noun}s overlap: {name!r} is matched by {chosen[name]!r} and by {glob!r}; remove one of the two"
                )
            chosen[name] = glob
    return [(glob, node) for node, glob in chosen.items()]


def some(paths: Sequence[str], most: int = 4) -> str:
    """Return the first few paths and the number of the rest, as text for an error message."""
    return ", ".join(repr(p) for p in paths[:most]) + (f" and {len(paths) - most} more" if len(paths) > most else "")


def _pattern(glob: str) -> re.Pattern[str]:
    stands_for = {"**.": r"(?:.*\.)?", ".**": r"(?:\..*)?", "**": ".*", "*": "[^.]*"}
    parts = (stands_for.get(part, re.escape(part)) for part in re.split(r"(\*\*\.|\.\*\*|\*\*|\*)", glob))
    return re.compile("".join(parts))
