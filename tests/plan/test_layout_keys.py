"""Keys of trees: JSON gives a plan's keys back as they are, or make_plan refuses them by path."""

import copy
import dataclasses
import enum
import math
import pickle
import sys
from collections import OrderedDict
from typing import Any, NamedTuple

import optree
import pytest
import torch
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL

import funcshard as fs
from funcshard._utils import tree


class Colour(enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


class Name(str):
    pass


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Node:
    """A registered node with static data."""

    child: Any
    static: Any


optree.register_pytree_node(Node, lambda n: ((n.child,), n.static), lambda s, c: Node(c[0], s), namespace=GLOBAL)

KEPT = {
    "str": "a b/ü\ud800@*", "negative": -3, "large": 2**200, "bool": True, "float": 0.1, "None": None,
    "tuple": (1, ("a", None, 2.5), False),
}  # fmt: skip
REFUSED = {
    "bytes": b"a", "enum member": Colour.RED, "IntEnum member": Number.ONE, "subclass of str": Name("a"),
    "frozenset": frozenset({1}), "complex": 1j, "dtype": torch.float32, "device": torch.device("cpu"), "nan": math.nan,
    "inf": math.inf, "tuple of bytes": ("a", (b"a",)), "number of 10,000 digits": 10**10000, "size": torch.Size([1]),
    "type": int,
}  # fmt: skip


@pytest.mark.parametrize("key", KEPT.values(), ids=KEPT)
def test_keys_and_static_data_that_json_gives_back_are_kept(key: Any) -> None:
    ordered = OrderedDict({key: torch.ones(1)})
    params, mesh = {"keys": {key: torch.arange(3.0)}, "node": Node(torch.ones(2), key), "ordered": ordered}, fs.Mesh()
    plan = fs.make_plan(params, mesh)
    again = fs.Plan.from_json(plan.to_json())
    assert (again, again.fingerprint(), again.structure) == (plan, plan.fingerprint(), plan.structure)
    back = fs.gather(fs.shard(params, again, mesh), again, mesh)
    assert list(back["keys"]) == [key]
    assert type(back["keys"].popitem()[0]) is type(key)
    assert back["node"].static == key


@pytest.mark.parametrize("key", REFUSED.values(), ids=REFUSED)
def test_keys_and_static_data_that_json_changes_are_refused_by_path(key: Any) -> None:
    words = rf"the key .* of the dictionary at 'a\.0' cannot be part of .* keys may be str.* found a {type(key).__name__}"
    with pytest.raises(TypeError, match=words):
        fs.make_plan({"a": [{key: torch.ones(1)}]}, 2)
    words = r"the node of class .*:Node at 'a\.0' cannot be part of a plan: its metadata .* let its flatten function return"
    with pytest.raises(TypeError, match=words):
        fs.make_plan({"a": [Node(torch.ones(1), key)]}, 2)


def nested(depth: int, wrap: Any = lambda node: {"a": node}) -> Any:
    node = torch.ones(2)
    for _ in range(depth):
        node = wrap(node)
    return node


WRAPS = {"namedtuple": lambda node: Pair(node, None), "custom": lambda node: Node(node, 0),
         "two leaves": lambda node: {"a": node, "b": torch.ones(1)}}  # fmt: skip


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_tree_as_deep_as_the_limit_goes_through_everything(wrap: Any, tmp_path: Any) -> None:
    params, mesh = nested(tree.DEEPEST, wrap), fs.Mesh()
    plan = fs.make_plan(params, mesh, units=[".".join(fs.make_plan(params, 1).leaves[0].path.split(".")[:100])])
    assert fs.Plan.from_json(plan.to_json()) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    shards = fs.shard(params, plan, mesh)
    fs.save(tmp_path / "saved", {"shards": shards}, plan, mesh)
    restored = fs.restore(tmp_path / "saved", plan, mesh)["shards"]
    for leaf in optree.tree_leaves(fs.gather(restored, plan, mesh)):
        assert leaf.eq(1).all()


@pytest.mark.parametrize("depth", [tree.DEEPEST + 1, 10 * sys.getrecursionlimit()])
def test_a_deeper_tree_is_refused_with_path_and_limit(depth: int) -> None:
    with pytest.raises(ValueError, match=rf"more than {tree.DEEPEST} containers inside each other at '.*': use lists"):
        fs.make_plan(nested(depth), 2)


def test_a_path_of_many_dotted_keys_is_refused_too() -> None:
    assert fs.make_plan({".".join("a" * tree.DEEPEST): torch.ones(1)}, 2).leaves
    with pytest.raises(ValueError, match=rf"more than {tree.DEEPEST} keys in one path at 'a\.a\..*…"):
        fs.make_plan({".".join("a" * 5000): torch.ones(1)}, 2)


def test_a_class_that_no_import_finds_is_refused_by_path() -> None:
    class Inner(NamedTuple):
        w: Any

    with pytest.raises(TypeError, match=r"the Inner at 'a' cannot be part of a plan, because its class is not found as"):
        fs.make_plan({"a": Inner(torch.ones(1))}, 2)
    assert copy.deepcopy(fs.make_plan({"a": Pair(torch.ones(1), None)}, 2))
