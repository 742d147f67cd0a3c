"""Cut the parts of units out of a structure, whatever the dots in its keys."""

from typing import Any

import pytest

from funcshard._utils import tree
from funcshard.plan.layout import cut_out, nodes_by_path


def part(structure: tree.Structure, path: str, keep: dict[int, int]) -> tree.Structure:
    return cut_out(nodes_by_path(structure, [path]), path, keep)


class Leaf:
    """An object that optree treats as a leaf, compared by identity."""


NESTED = {"blocks": [{"attn": Leaf(), "mlp": {"up": Leaf()}}, {"attn": Leaf(), "mlp": {"up": Leaf()}}], "head": Leaf()}
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
    ],
)
def test_cut_takes_nested_trees_and_flat_dictionaries_alike(whole: Any, path: str, mine: Any, expected: Any) -> None:
    structure, _, paths = tree.describe(whole)
    owned = [p for p in paths if tree.is_under(p, path)] if mine is None else mine
    keep = {paths.index(p): number for number, p in enumerate(owned)}
    assert tree.build(part(structure, path, keep), owned) == expected


def test_cut_of_a_tree_that_mixes_nesting_and_dotted_keys_holds_every_leaf_under_the_path() -> None:
    whole = {"a": {"x": Leaf()}, "a.b.w": Leaf()}
    structure, _, paths = tree.describe(whole)
    assert paths == ["a.b.w", "a.x"] or paths == ["a.x", "a.b.w"]
    inner = part(structure, "a.b", {paths.index("a.b.w"): 0})
    assert tree.describe(tree.build(inner, ["w"]))[1] == ["w"]
    outer = part(structure, "a", {i: i for i in range(2)})
    assert sorted(tree.describe(tree.build(outer, paths))[1]) == sorted(paths)


def test_keys_of_one_text_are_all_found() -> None:
    structure, leaves, _ = tree.describe({1: None, "1": Leaf()})
    assert tree.build(part(structure, "1", {0: 0}), leaves) == leaves[0]


def test_a_node_beside_a_dictionary_of_the_same_path_is_refused_by_path() -> None:
    structure, _, _ = tree.describe({"x": {"a": Leaf(), "a.b": Leaf()}})
    with pytest.raises(ValueError, match=r"mixes nested containers and dotted keys.*found another node at 'x\.a': nest the"):
        part(structure, "x.a", {0: 0, 1: 1})
