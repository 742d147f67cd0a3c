"""Pytrees as data: ``describe`` and ``build`` are inverses, and structures survive JSON."""

import json
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest

from funcshard._utils import tree


class Pair(NamedTuple):
    left: Any
    right: Any


class Leaf:
    """An object that optree treats as a leaf, compared by identity."""


TREES = {
    "leaf": Leaf(),
    "empty dict": {},
    "nothing": None,
    "dict": {"b": Leaf(), "a": Leaf()},
    "integer keys": {10: Leaf(), 2: Leaf()},
    "mixed keys": {"a": Leaf(), 1: Leaf()},
    "tuple keys": {("a", 1): Leaf(), ("a", 0): Leaf()},
    "ordered dict": OrderedDict([("b", Leaf()), ("a", Leaf())]),
    "list": [Leaf(), Leaf()],
    "tuple": (Leaf(),),
    "namedtuple": Pair(Leaf(), {"x": Leaf()}),
    "empty places": {"a": None, "b": [None, Leaf()], "c": ()},
    "deque": deque([Leaf(), Leaf()], maxlen=3),
    "nested": {"a": [{"b": (Leaf(), Pair(None, Leaf()))}], "c": OrderedDict(z=Leaf(), y=[Leaf()])},
    "dotted": {"a.b": Leaf(), "a.c": Leaf(), "d": Leaf()},
}


@pytest.mark.parametrize("given_tree", TREES.values(), ids=TREES)
def test_build_is_the_inverse_of_describe_also_through_json(given_tree: Any) -> None:
    structure, leaves, paths = tree.describe(given_tree)
    again = tree.freeze(json.loads(json.dumps(structure)))
    assert again == structure
    assert hash(again) == hash(structure)
    for rebuilt in (tree.build(structure, leaves), tree.build(again, leaves)):
        assert rebuilt == given_tree
        assert type(rebuilt) is type(given_tree)
    assert len(paths) == len(set(paths)) == len(leaves)


def test_two_insertion_orders_of_one_dict_are_one_structure_and_differ_in_insertion_order() -> None:
    one, two = {"b": [1, None], "a": {"d": 2, "c": 3}}, {"a": {"c": 3, "d": 2}, "b": [1, None]}
    assert tree.describe(one)[0] == tree.describe(two)[0]
    assert tree.insertion_order(one) == [("b.0", 1), ("a.d", 2), ("a.c", 3)]
    assert tree.insertion_order(two) == [("a.c", 3), ("a.d", 2), ("b.0", 1)]


@pytest.mark.parametrize(
    "given_tree",
    [{"a": {"b": Leaf()}, "a.b": Leaf()}, {1: Leaf(), "1": Leaf()}, {"a": [Leaf()], "a.0": Leaf()}],
    ids=["dotted key", "integer and string", "index"],
)
def test_two_leaves_of_one_path_are_refused(given_tree: Any) -> None:
    with pytest.raises(ValueError, match=r"two leaves of the tree have the path '.*'; .* rename one of the keys"):
        tree.describe(given_tree)


def test_a_defaultdict_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"the defaultdict at 'a\.0' cannot be part of a plan.* convert it to a"):
        tree.describe({"a": [defaultdict(list, x=Leaf())]})
    with pytest.raises(TypeError, match=r"the defaultdict at the root of the tree cannot be part of a plan"):
        tree.describe(defaultdict(list, x=Leaf()))


def test_is_under_compares_whole_components() -> None:
    inside = ["blocks.1.w", "blocks.1"]
    assert [path for path in [*inside, "blocks.10.w", "blocks", ""] if tree.is_under(path, "blocks.1")] == inside
    assert tree.is_under("anything", "")
    assert tree.is_under("", "")


def test_natural_key_orders_numbers_as_numbers() -> None:
    paths = ["b.10.w", "b.2.w", "b.2", "a", "b", "layer10", "layer9", "b.1.w"]
    assert sorted(paths, key=tree.natural_key) == ["a", "b", "b.1.w", "b.2", "b.2.w", "b.10.w", "layer9", "layer10"]
