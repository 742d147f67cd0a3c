"""Random parameter trees, from a seed: every container, keys that look like paths, odd leaves."""

from __future__ import annotations

import enum
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL

__all__ = ["Colour", "Node", "Pair", "random_tree", "random_units"]


class Pair(NamedTuple):
    left: Any
    right: Any


class Colour(enum.Enum):
    RED = "red"


class Node:
    """A registered node with children under names, and static data."""

    def __init__(self, children: dict[str, Any], static: Any) -> None:
        self.children, self.static = children, static

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and (self.children, self.static) == (other.children, other.static)

    __hash__ = None  # type: ignore[assignment]


optree.register_pytree_node(
    Node,
    lambda node: (list(node.children.values()), (tuple(node.children), node.static), list(node.children)),
    lambda data, children: Node(dict(zip(data[0], children, strict=True)), data[1]),
    namespace=GLOBAL,
)

# Keys that a plan holds, and some that it must refuse.
KEYS: tuple[Any, ...] = (
    "a", "b", "w", "a.b", "a.b.w", "b.0", "0", "1", "10", 0, 1, 2, -1, "*", "**", "a@0", "a@1", "/", "..", ".", "", "a.",
    ".a", "ü", "a b", "float32", "(root)", "+", "a+b", True, None, 1.5, ("a", 0), "None", "True", 'q"', "\\", "\n", "\ud800",
    b"a", Colour.RED, frozenset({1}), float("nan"), 2**70,
)  # fmt: skip
DTYPES = (torch.float32,) * 6 + (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)
SIZES = ((), (1,), (2,), (3,), (5,), (7,), (0,), (2, 3), (3, 0), (1, 1, 4))


def random_tree(rng: random.Random) -> Any:
    """Return a random tree; a few of its keys may be of a kind that no plan can hold."""
    odd = 0.02
    shared: list[torch.Tensor] = []
    plain = [key for key in KEYS if type(key) is int or (isinstance(key, str) and key and "." not in key)]

    def leaf() -> Any:
        if shared and rng.random() < 0.05:
            return rng.choice(shared)  # a tied leaf
        if rng.random() < odd / 4:
            return rng.choice([1.0, "text", torch.ones(2).to_sparse(), object(), torch.ones(2, device="meta")])
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        values = torch.randint(-9, 9, rng.choice(SIZES), generator=generator)
        shared.append(values.to(rng.choice(DTYPES)))
        return shared[-1]

    def key() -> Any:
        return rng.choice(KEYS) if rng.random() < max(odd, 0.3 * rng.random()) else rng.choice(plain)

    def node(depth: int) -> Any:
        if depth == 0 or rng.random() < 0.35:
            return None if rng.random() < 0.1 else leaf()
        number = rng.choice([0, 1, 1, 2, 2, 3])
        children = [node(depth - 1) for _ in range(number)]
        keyed: Callable[[], dict[Any, Any]] = lambda: {key(): child for child in children}  # noqa: E731
        kind = rng.choice(["dict"] * 6 + ["list"] * 3 + ["tuple", "pair", "ordered", "deque", "node", "default"])
        if kind == "default" and rng.random() > odd:
            kind = "dict"
        return {
            "dict": keyed,
            "list": lambda: children,
            "tuple": lambda: tuple(children),
            "pair": lambda: Pair(node(depth - 1), node(depth - 1)),
            "ordered": lambda: OrderedDict(keyed()),
            "deque": lambda: deque(children, maxlen=rng.choice([None, 5])),
            "node": lambda: Node({str(each): child for each, child in zip("xyz", children, strict=False)}, key()),
            "default": lambda: defaultdict(list, keyed()),
        }[kind]()

    return node(rng.choice([1, 2, 3, 4, 6]))


def random_units(rng: random.Random, paths: list[str]) -> Any:
    """Return random units for a tree with leaves at ``paths``: paths, globs, groups and options."""
    nodes = sorted({".".join(path.split(".")[:i]) for path in paths for i in range(1, path.count(".") + 2)})
    if not nodes or rng.random() < 0.2:
        return []
    chosen = rng.sample(nodes, min(len(nodes), rng.choice([1, 1, 2, 3])))
    form = rng.choice(["paths", "paths", "glob", "group", "mapping"])
    if form == "glob":
        return [rng.choice(["*", "**", "*.*", f"{chosen[0]}.*", f"**.{chosen[0].split('.')[-1]}"])]
    if form == "group":
        return [chosen]
    if form == "mapping":
        return {path: {"strategy": rng.choice(["full_shard", "shard_grad_op", "no_shard"])} for path in chosen}
    return chosen
