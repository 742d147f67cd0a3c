"""Units are cut out of trees; keys that JSON gives back, or refused by path; which leaves are trainable."""

from __future__ import annotations

import copy
import enum
import math
import pickle
import sys
from collections import OrderedDict
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import funcshard as fs
from funcshard._utils import tree
from funcshard.plan.layout import cut_out, nodes_by_path
from tests.trees import Colour, Node, Pair


def part(structure: tree.Structure, path: str, keep: dict[int, int]) -> tree.Structure:
    return cut_out(nodes_by_path(structure, [path]), path, keep)


class Leaf:
    """An object that optree treats as a leaf, compared by identity."""


NESTED = {"blocks": [{"attn": Leaf(), "mlp": {"up": Leaf()}}, {"attn": Leaf(), "mlp": {"up": Leaf()}}], "head": Leaf()}
MIXED = {"a": {"x": Leaf()}, "a.b.w": Leaf()}
FLAT = {"blocks.0.attn": Leaf(), "blocks.0.mlp.up": Leaf(), "blocks.1.attn": Leaf(), "blocks.10.w": Leaf(), "head": Leaf()}


@pytest.mark.parametrize(
    ("whole", "path", "mine", "expected"),
    [
        (NESTED, "blocks.1", None, {"attn": "blocks.1.attn", "mlp": {"up": "blocks.1.mlp.up"}}),
        (NESTED, "blocks.1", ["blocks.1.attn"], {"attn": "blocks.1.attn", "mlp": {"up": None}}),
        (NESTED, "head", None, "head"),
        (NESTED, "", ["head"], {"blocks": [{"attn": None, "mlp": {"up": None}}] * 2, "head": "head"}),
        (FLAT, "blocks.0", None, {"attn": "blocks.0.attn", "mlp.up": "blocks.0.mlp.up"}),
        (FLAT, "blocks.0", ["blocks.0.attn"], {"attn": "blocks.0.attn"}),
        (FLAT, "blocks.1", None, {"attn": "blocks.1.attn"}),
        (FLAT, "head", None, "head"),
        (FLAT, "", ["head"], {"head": "head"}),
        (FLAT, "blocks", ["blocks.10.w"], {"10.w": "blocks.10.w"}),
        ({"enc": FLAT, "dec": Leaf()}, "enc.blocks.1", None, {"attn": "enc.blocks.1.attn"}),
        (MIXED, "a.b", None, {"w": "a.b.w"}),
        (MIXED, "a", None, {"x": "a.x", "b.w": "a.b.w"}),
        ({1: None, "1": Leaf()}, "1", None, "1"),
    ],
)
def test_cut_takes_nested_trees_and_flat_dictionaries_alike(whole: Any, path: str, mine: Any, expected: Any) -> None:
    structure, _, paths = tree.describe(whole)
    owned = [p for p in paths if tree.is_under(p, path)] if mine is None else mine
    keep = {paths.index(p): number for number, p in enumerate(owned)}
    assert tree.build(part(structure, path, keep), owned) == expected


def test_a_node_beside_a_dictionary_of_the_same_path_is_refused_by_path() -> None:
    structure, _, _ = tree.describe({"x": {"a": Leaf(), "a.b": Leaf()}})
    with pytest.raises(ValueError, match=r"mixes nested containers and dotted keys.*found another node at 'x\.a': nest the"):
        part(structure, "x.a", {0: 0, 1: 1})


# --- keys -----------------------------------------------------------------------------------------


class Number(enum.IntEnum):
    ONE = 1


class Name(str):
    pass


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
    params, mesh = {"keys": {key: torch.arange(3.0)}, "node": Node({"w": torch.ones(2)}, key), "ordered": ordered}, fs.Mesh()
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
        fs.make_plan({"a": [Node({"w": torch.ones(1)}, key)]}, 2)


def nested(depth: int, wrap: Any = lambda node: {"a": node}) -> Any:
    node = torch.ones(2)
    for _ in range(depth):
        node = wrap(node)
    return node


WRAPS = {"namedtuple": lambda node: Pair(node, None), "custom": lambda node: Node({"child": node}, 0),
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


# --- leaves ---------------------------------------------------------------------------------------


def marked(*, frozen: bool) -> dict[str, torch.Tensor]:
    """Return a parameter from ``make_functional``."""
    return fs.make_functional(nn.ParameterDict({"w": parameter(not frozen)}))[1]


def parameter(requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(torch.ones(3), requires_grad=requires_grad)


def plain(requires_grad: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(3, dtype=dtype, requires_grad=requires_grad)


# name -> (tree, paths of the leaves that are trainable)
TREES: dict[str, tuple[Any, set[str]]] = {
    "a frozen module": (marked(frozen=True), set()),
    "a frozen module beside a trainable one": ({"a": marked(frozen=True), "b": marked(frozen=False)}, {"b.w"}),
    "a frozen module beside plain adapters": ({"base": marked(frozen=True), "a": plain(), "b": plain()}, {"a", "b"}),
    "a frozen module, adapters, one frozen": ({"base": marked(frozen=True), "a": plain(True), "b": plain()}, {"a"}),
    "a module beside plain tensors": ({"base": marked(frozen=False), "a": plain()}, {"base.w", "a"}),
    "plain tensors": ({"a": plain(), "b": plain(dtype=torch.int64), "c": plain(dtype=torch.complex64)}, {"a", "c"}),
    "plain tensors, one of which requires a gradient": ({"a": plain(True), "b": plain()}, {"a"}),
    "frozen nn.Parameters": ({"a": parameter(False), "b": parameter(False)}, set()),
    "nn.Parameters": ({"a": parameter(True), "b": parameter(False)}, {"a"}),
    "copies of a frozen module's params": ({"w": marked(frozen=True)["w"].to(torch.float64)}, {"w"}),
    "a module frozen after make_functional": ({"w": marked(frozen=False)["w"].requires_grad_(False)}, set()),
    "a module no longer frozen after make_functional": ({"w": marked(frozen=True)["w"].requires_grad_()}, {"w"}),
}


@pytest.mark.parametrize(("params", "trainable"), TREES.values(), ids=TREES)
def test_a_leaf_of_a_module_is_trainable_if_it_requires_a_gradient_whatever_the_others_are(params, trainable) -> None:
    plan = fs.make_plan(params, 2)
    found = {leaf.path for unit in plan.unit_list for buffer in unit.buffers if buffer.trainable for leaf in buffer.leaves}
    assert found == trainable


class OnlyAName(nn.Parameter):
    """A class that adds nothing to the operations of its tensors."""


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def placeholder() -> torch.Tensor:
    apply, params, _ = fs.make_functional(nn.Linear(1, 3))
    return fs.fully_shard(apply, fs.make_plan(params, fs.Mesh()), fs.Mesh()).outside["bias"]


PLAIN = {
    "placeholder": placeholder,
    "nn.Buffer": lambda: nn.Buffer(torch.ones(3)),
    "fake tensor": fake,
    "a subclass of nn.Parameter": lambda: OnlyAName(torch.ones(3)),
}


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_leaves_that_are_planned(make) -> None:
    assert [leaf.shape for leaf in fs.make_plan({"w": make()}, 2).leaves] == [(3,)]
