"""Check the structure of a tree that a file gives, before ``tree`` builds anything of it."""

from __future__ import annotations

from typing import Any


def check_structure(structure: Any) -> int:
    """Return the number of leaves of a structure that was read from a file.

    Classes are not looked up here, but when a tree is built.

    Raises:
        ValueError: it is no structure, or the numbers of its leaves have gaps.
    """
    nodes, leaf_numbers = [structure], set[int]()
    while nodes:
        node = nodes.pop()
        if type(node) is int and node >= 0:
            leaf_numbers.add(node)
        elif node is not None:
            if not (type(node) is tuple and len(node) == 3 and type(node[2]) is tuple):
                raise ValueError(
                    f"a tree must hold leaves and containers; found {str(node)[:40]}, which is no "
                    "container"
                )
            _check_container(*node)
            nodes.extend(node[2])
    if len(leaf_numbers) != max(leaf_numbers, default=-1) + 1:
        raise ValueError("the leaves of a tree must be numbered from 0, without gaps")
    return len(leaf_numbers)


def _check_container(kind: Any, meta: Any, children: tuple[Any, ...]) -> None:
    try:
        hash(meta)
    except TypeError:
        raise ValueError(
            f"a tree must name the keys of its containers; found {str(meta)[:40]}"
        ) from None
    if kind in ("dict", "ordered_dict"):
        right = type(meta) is tuple and len(set(meta)) == len(meta) == len(children)
    elif kind == "custom":
        right = type(meta) is tuple and len(meta) == 2 and type(meta[0]) is str
    else:
        right = (kind == "namedtuple" and type(meta) is str) or (
            kind in ("list", "tuple") and meta is None
        )
    if not right:
        raise ValueError(
            f"a tree must name the keys or the class of each container; found a {str(kind)[:20]!r} "
            f"of {len(children)} children with {str(meta)[:40]}"
        )
