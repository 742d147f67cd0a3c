"""Leaves that are local along mesh axes: the option ``local`` of ``make_plan``, with and without cuts."""

import pytest
import torch

import funcshard as fs
from funcshard.plan.unit_plan import LeafCut

MESH = {"replicate": 2, "shard": 2, "tensor": 4, "expert": 2}
PARAMS = {"up": torch.zeros(2, 6), "down": torch.zeros(6, 2), "scale": torch.zeros(()), "norm": torch.zeros(6)}


def leaf(plan: fs.Plan, path: str) -> tuple:
    """Return the axes along which a leaf is local, its cuts and its whole shape."""
    found = [(buffer.local, spec) for unit in plan.unit_list for buffer in unit.buffers for spec in buffer.leaves]
    ((local, spec),) = [(local, spec) for local, spec in found if spec.path == path]
    return local, spec.cuts, spec.whole_shape


TENSOR, TENSOR_1, EXPERT = LeafCut("tensor", 0, 4), LeafCut("tensor", 1, 4), LeafCut("expert", 0, 2)
LOCAL = [  # the option for the leaf, its axes, its cuts and its whole shape
    ("tensor", ("tensor",), (), (2, 6)),
    (["tensor"], ("tensor",), (), (2, 6)),
    ({"tensor": 0}, ("tensor",), (TENSOR,), (8, 6)),
    ({"tensor": -1}, ("tensor",), (TENSOR_1,), (2, 24)),
    ({"expert": 0, "tensor": 1}, ("tensor", "expert"), (TENSOR_1, EXPERT), (4, 24)),
    ({"expert": 0, "tensor": 0}, ("tensor", "expert"), (TENSOR, EXPERT), (16, 6)),
    ({"tensor": 0, "expert": None}, ("tensor", "expert"), (TENSOR,), (8, 6)),
    ({"shard": 0, "tensor": 1}, ("shard", "tensor"), (LeafCut("shard", 0, 2), TENSOR_1), (4, 24)),
    (("tensor", "replicate"), ("replicate", "tensor"), (), (2, 6)),
    (tuple(MESH), tuple(MESH), (), (2, 6)),
]


@pytest.mark.parametrize(("option", "axes", "cuts", "whole"), LOCAL, ids=str)
def test_a_leaf_says_along_which_axes_it_differs_and_how_it_is_cut(option, axes, cuts, whole):
    plan = fs.make_plan(PARAMS, MESH, local={"u*": option})
    assert leaf(plan, "up") == (axes, cuts, whole)
    assert leaf(plan, "norm") == ((), (), (6,))
    assert fs.Plan.from_json(plan.to_json()) == plan


def test_leaves_that_are_local_along_different_axes_lie_in_different_buffers():
    plan = fs.make_plan(PARAMS, MESH, local={"up": {"tensor": 0}, "down": {"tensor": 1}, "norm": ("tensor", "expert")})
    found = {buffer.key: [spec.path for spec in buffer.leaves] for buffer in plan.unit_list[0].buffers}
    local = {"float32.local_tensor": ["down", "up"], "float32.local_tensor_expert": ["norm"]}
    assert found == {"float32": ["scale"], **local}


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
