"""Globs of paths, and the nodes of a tree that they name.

``*`` matches any part of one dotted component, and ``**`` any number of components: ``**.w`` is
``w`` at any depth, and ``blocks.**`` is ``blocks`` and all below it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from funcshard._utils import tree
from funcshard._utils.options import did_you_mean, some

_PATTERNS = {"**.": r"(?:.*\.)?", ".**": r"(?:\..*)?", "**": ".*", "*": "[^.]*"}


@functools.lru_cache(maxsize=256)
def matcher(glob: str) -> Callable[[str], object]:
    """Return a function that is true of the paths that a path or glob matches.

    Example:
        >>> from funcshard.plan.globs import matcher
        >>> [path for path in ("w", "a.w", "a.b.w", "a.wx") if matcher("**.w")(path)]
        ['w', 'a.w', 'a.b.w']
    """
    # The stars with the dots beside them: "**." may match nothing, its dot included.
    glob_parts = re.split(r"(\*\*\.|\.\*\*|\*\*|\*)", glob)
    regex_text = "".join(_PATTERNS.get(part, re.escape(part)) for part in glob_parts)
    return re.compile(regex_text, re.DOTALL).fullmatch


def matches(glob: str, path: str) -> bool:
    """Return whether a path or glob matches a path."""
    return matcher(glob)(path) is not None


def match(globs: Iterable[str], uses: Sequence[tuple[str, ...]], noun: str) -> list[str]:
    """Return the nodes of a tree that paths or globs name.

    Arguments:
        globs: paths or globs.
        uses: the paths of each leaf; a tied leaf has several.
        noun: the word for a glob in errors, such as ``"unit"``.

    Raises:
        TypeError: ``globs`` is not a list of strings.
        ValueError: a glob matches no node.
    """
    listed_globs = list_of_globs(globs, f"{noun}s")
    # Why so: most calls have no globs, and the nodes of a large tree take long.
    tree_nodes = dict.fromkeys(nodes_of(tuple(uses)) if listed_globs else ())
    return [node for glob in listed_globs for node in found_by(glob, tree_nodes, noun)]


def last_match(globs: Collection[str], names: Collection[str]) -> str | None:
    """Return the path or glob that counts for what has these names, if any.

    A path counts before a glob, and a later glob before an earlier one.
    """
    matching_globs = [glob for glob in globs if glob in names] or [
        glob for glob in globs if any(matches(glob, name) for name in names)
    ]
    return matching_globs[-1] if matching_globs else None


# Why a cache: a sweep plans one model again and again.
@functools.lru_cache(maxsize=4)
def nodes_of(uses: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """Return the paths of all nodes that hold leaves, in natural order."""
    # Why no set: natural order has ties, such as "a1" and "a.1", and all ranks must agree.
    tree_nodes: dict[str, None] = {}
    for paths in uses:
        for path in paths:
            for node_path in tree.upwards(path):
                # The root is a node that globs find only if it is a leaf itself.
                if node_path in tree_nodes or (path and not node_path):
                    break
                tree_nodes[node_path] = None
    return tuple(sorted(tree_nodes, key=tree.natural_key))


def list_of_globs(globs: Any, option: str) -> list[Any]:
    """Return a list of paths or globs as a list; ``TypeError`` if it is none."""
    # Why tensors: they are iterable, and their elements are no better.
    if isinstance(globs, str | torch.Tensor) or not isinstance(globs, Iterable):
        raise _no_globs(option, globs)
    return list(globs)


def _no_globs(option: str, value: Any, place: str = "") -> TypeError:
    remedy = ""
    if isinstance(value, str):
        remedy = f": write [{value!r}]"
    # The usual mistakes: a class of modules, or a policy that was not called.
    elif isinstance(value, type):
        remedy = f": pass units=fs.wrap.by_class({value.__name__})(module)"
    elif callable(value):
        remedy = ": apply a policy to the module, as in units=policy(module)"
    return TypeError(f"{option} must be a list of paths or globs; found {value!r}{place}{remedy}")


def found_by(glob: Any, nodes: Collection[str], noun: str) -> list[str]:
    """Return the nodes that one glob matches; raise if there is none. The root matches itself."""
    if not isinstance(glob, str):
        raise _no_globs(f"{noun}s", glob, " in it")
    # Note: callers pass dictionaries as ``nodes``, so that this is no search.
    matched_nodes = [glob] * (glob in nodes)
    if "*" in glob:
        matched_nodes = list(filter(matcher(glob), nodes))
    if not matched_nodes and glob != "":
        raise ValueError(
            f"{noun} {glob!r} matches no part of the tree; {noun}s are paths or globs of nodes "
            f"that hold leaves, such as {some(list(nodes))}{_remedy(glob, nodes)}"
        )
    return matched_nodes


def _remedy(glob: str, nodes: Collection[str]) -> str:
    above, _, last = glob.rpartition(".")
    # The usual mistake with layers as lax.scan has them: there is one leaf, not L.
    if last.isdecimal() and above in nodes:
        return f"; if {above!r} holds stacked layers, call unstack(params, {above!r}) first"
    known_names = list(nodes)
    otherwise = ""
    if "*" in glob:
        known_names = [re.sub(r"(?<![^.])\d+(?![^.])", "*", node_path) for node_path in nodes]
        # Note: a glob is usually meant for repeated layers, such as vit.layers.*.
        repeated = [name for name in dict.fromkeys(known_names) if name.endswith(".*")]
        otherwise = f"repeated modules are {some(repeated)}" if repeated else ""
    name_question = did_you_mean(glob, known_names, otherwise=otherwise)
    # peft's modules lie under a prefix.
    deeper_name = next((name for name in known_names if name.endswith(f".{glob}")), None)
    if deeper_name is not None:
        name_question = f"did you mean {deeper_name!r}?"
    return name_question and f": {name_question}"
