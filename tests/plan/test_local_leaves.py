"""Leaves that are local along mesh axes: the option ``local`` of ``make_plan``, with and without cuts."""

import re

import pytest
import torch

import funcshard as fs
from funcshard.plan.unit_plan import LeafCut

MESH = {"replicate": 2, "shard": 2, "tensor": 4, "expert": 2}
PARAMS = {"up": torch.zeros(2, 6), "down": torch.zeros(6, 2), "scale": torch.zeros(()), "norm": torch.zeros(6)}


def leaf(plan: fs.Plan, path: str) -> tuple:
    """Return the axes along which a leaf is local, its cuts and its whole shape."""
    for unit in plan.unit_list:
        for buffer in unit.buffers:
            for spec in buffer.leaves:
                if spec.path == path:
                    return buffer.local, spec.cuts, spec.whole_shape
    raise AssertionError(path)


@pytest.mark.parametrize(
    ("local", "axes", "cuts", "whole"),
    [
        ({"up": "tensor"}, ("tensor",), (), (2, 6)),
        ({"up": ["tensor"]}, ("tensor",), (), (2, 6)),
        ({"up": {"tensor": 0}}, ("tensor",), (LeafCut("tensor", 0, 4),), (8, 6)),
        ({"up": {"tensor": -1}}, ("tensor",), (LeafCut("tensor", 1, 4),), (2, 24)),
        (
            {"up": {"expert": 0, "tensor": 1}},
            ("tensor", "expert"),
            (LeafCut("tensor", 1, 4), LeafCut("expert", 0, 2)),
            (4, 24),
        ),
        (
            {"up": {"expert": 0, "tensor": 0}},
            ("tensor", "expert"),
            (LeafCut("tensor", 0, 4), LeafCut("expert", 0, 2)),
            (16, 6),
        ),
        ({"up": {"tensor": 0, "expert": None}}, ("tensor", "expert"), (LeafCut("tensor", 0, 4),), (8, 6)),
        ({"up": {"shard": 0, "tensor": 1}}, ("shard", "tensor"), (LeafCut("shard", 0, 2), LeafCut("tensor", 1, 4)), (4, 24)),
        ({"u*": ("tensor", "replicate")}, ("replicate", "tensor"), (), (2, 6)),
        (["up"], ("replicate", "shard", "tensor", "expert"), (), (2, 6)),
    ],
    ids=str,
)
def test_a_leaf_says_along_which_axes_it_differs_and_how_it_is_cut(local, axes, cuts, whole):
    plan = fs.make_plan(PARAMS, MESH, local=local)
    assert leaf(plan, "up") == (axes, cuts, whole)
    assert leaf(plan, "norm") == ((), (), (6,))
    assert fs.Plan.from_json(plan.to_json()) == plan


def test_leaves_that_are_local_along_different_axes_lie_in_different_buffers():
    plan = fs.make_plan(PARAMS, MESH, local={"up": {"tensor": 0}, "down": {"tensor": 1}, "norm": ("tensor", "expert")})
    found = {buffer.key: [spec.path for spec in buffer.leaves] for buffer in plan.unit_list[0].buffers}
    assert found == {
        "float32": ["scale"],
        "float32.local_tensor": ["down", "up"],
        "float32.local_tensor_expert": ["norm"],
    }


def test_the_plan_says_which_leaves_are_local_to_a_rank():
    plan = fs.make_plan({"a": torch.zeros(5), "experts": [torch.zeros(4), torch.zeros(4)]}, 2, local=["experts.*"])
    (unit,) = plan.unit_list
    assert {b.key: (b.local, b.shards, b.padded_numel) for b in unit.buffers} == {
        "float32": ((), 2, 6),
        "float32.local": (("replicate", "shard"), 1, 8),
    }
    assert [line.rstrip()[-15:] for line in str(plan).splitlines() if "float32.local" in line] == ["local to a rank"]


def test_an_axis_of_one_rank_makes_one_slice_of_the_whole():
    plan = fs.make_plan(PARAMS, {"shard": 2, "tensor": 1}, local={"up": {"tensor": 0}})
    assert leaf(plan, "up") == (("tensor",), (LeafCut("tensor", 0, 1),), (2, 6))


@pytest.mark.parametrize(
    ("local", "words"),
    [
        ({"up": "tensors"}, "local node 'up' must be local along one or several axes of the mesh, ['replicate', 'shard',"),
        ({"up": {"tensor": 2}}, "local leaf 'up' is to be a slice along dim 2 for axis 'tensor'; found the shape (2, 6)"),
        ({"up": {"tensor": -3}}, "local leaf 'up' is to be a slice along dim -3 for axis 'tensor'; found the shape (2, 6)"),
        ({"scale": {"tensor": 0}}, "local leaf 'scale' is to be a slice along dim 0 for axis 'tensor'; found the shape ()"),
        ({"up": {"tensor": "0"}}, "local node 'up' must be local along one or several axes of the mesh"),
        ({"up": {"tensor": True}}, "local node 'up' must be local along one or several axes of the mesh"),
        ({"up": {}}, "local node 'up' must be local along one or several axes of the mesh"),
        ({"right": "tensor"}, "local node 'right' matches no part of the tree"),
    ],
    ids=str,
)  # fmt: skip
def test_axes_and_dims_that_make_no_sense_are_refused(local, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        fs.make_plan(PARAMS, MESH, local=local)
