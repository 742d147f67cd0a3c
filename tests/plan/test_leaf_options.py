"""Leaves that are local along mesh axes: the option ``local`` of ``make_plan``, and DTensors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import funcshard as fs
from funcshard.plan import LeafCut
from tests.ranks import run_ranks

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


def test_leaves_that_are_local_along_every_data_axis_are_neither_cut_nor_padded():
    plan = fs.make_plan({"a": torch.zeros(5), "experts": [torch.zeros(4), torch.zeros(4)]}, 2, local=["experts.*"])
    forms = [(buffer.local, buffer.shards, buffer.padded_numel) for buffer in plan.unit_list[0].buffers]
    assert forms == [((), 2, 6), (("replicate", "shard"), 1, 8)]
    assert "local to a rank" in str(plan)


def test_an_axis_of_one_rank_makes_one_slice_of_the_whole():
    plan = fs.make_plan(PARAMS, {"shard": 2, "tensor": 1}, local={"up": {"tensor": 0}})
    assert leaf(plan, "up") == (("tensor",), (LeafCut("tensor", 0, 1),), (2, 6))


# --- DTensors -------------------------------------------------------------------------------------


def leaf_on(device_mesh: Any, *placements: Any, shape: tuple[int, ...] = (4, 6)) -> DTensor:
    return distribute_tensor(torch.arange(24.0).view(shape), device_mesh, placements)


def kept(mesh: fs.Mesh) -> dict[str, Any]:
    device = mesh.device_mesh
    params = {
        "plain": torch.zeros(2),
        "rows": leaf_on(device["tensor"], Shard(0)),
        "columns": leaf_on(device["tensor"], Shard(-1)),
        "copies": leaf_on(device["tensor"], Replicate()),
        "one rank": leaf_on(device["expert", "tensor"], Shard(0), Shard(0)),
    }
    plan = fs.make_plan(params, mesh)
    assert fs.Plan.from_json(plan.to_json()) == plan == fs.make_plan(params, {"expert": 1, "tensor": 2})
    shards = fs.shard(params, plan, mesh)
    back = fs.gather(shards, plan, mesh)
    for name, value in params.items():
        assert type(back[name]) is type(value), name
        assert torch.equal(back[name], value), name
        if name != "plain":
            assert (back[name].placements, back[name].device_mesh) == (value.placements, value.device_mesh)
    leaves = {leaf.path: leaf for leaf in plan.leaves}
    keys = {leaf.path: buffer.key for buffer in plan.units[""].buffers for leaf in buffer.leaves}
    renamed = fs.Mesh.from_device_mesh(device["tensor"], names={"tensor": "model"})
    other = fs.make_plan({"rows": params["rows"]}, renamed)
    back = fs.gather(fs.shard({"rows": params["rows"]}, other, renamed), other, renamed)
    assert torch.equal(back["rows"].full_tensor(), params["rows"].full_tensor())
    return {
        name: (leaf.shape, leaf.whole_shape, leaf.cuts, leaf.placements, keys[name]) for name, leaf in leaves.items()
    } | {"renamed": other.leaves[0].placements}


def test_a_plan_keeps_placements_by_axis_and_gather_returns_the_same_dtensors() -> None:
    rows, columns = LeafCut("tensor", 0, 2), LeafCut("tensor", 1, 2)
    for found in run_ranks(kept, 2, shape={"expert": 1, "tensor": 2}):
        assert found == {
            "plain": ((2,), (2,), (), (), "float32"),
            "copies": ((4, 6), (4, 6), (), (("tensor", None),), "float32"),
            "rows": ((2, 6), (4, 6), (rows,), (("tensor", 0),), "float32.local_tensor"),
            "columns": ((4, 3), (4, 6), (columns,), (("tensor", 1),), "float32.local_tensor"),
            "one rank": ((2, 6), (4, 6), (rows,), (("expert", 0), ("tensor", 0)), "float32.local_expert_tensor"),
            "renamed": (("model", 0),),
        }


def plan(leaf: Any, mesh: Any, **options: Any) -> fs.Plan:
    return fs.make_plan({"w": leaf}, mesh, **options)


def refused(mesh: fs.Mesh) -> None:
    tensor = mesh.device_mesh["tensor"]
    named = lambda *names: init_device_mesh("cpu", (2,), mesh_dim_names=names or None)  # noqa: E731
    leaf, module = leaf_on(tensor, Shard(0)), nn.Linear(6, 4)
    own = plan(leaf, mesh)
    shards, unit = fs.shard({"w": leaf}, own, mesh), own.units[""]
    run = lambda shards: fs.unshard(lambda p: p["w"].to_local().sum(), unit, mesh)(shards[""])  # noqa: E731
    module.weight = nn.Parameter(leaf)
    apply, *_ = fs.make_functional(module)
    larger = {"weight": distribute_tensor(torch.zeros(8, 6), tensor, [Shard(0)]), "bias": torch.zeros(4)}
    cases = [
        (lambda: plan(leaf_on(named(), Shard(0)), mesh),
         "leaf 'w' is a DTensor, which must lie on a DeviceMesh whose axes have names; found none: pass"),
        (lambda: plan(leaf_on(named("tp"), Shard(0)), mesh),
         "placed along axes of the mesh, {'replicate': 1, 'shard': 1, 'tensor': 2}; found axis 'tp' of 2"),
        (lambda: plan(leaf, {"shard": 2, "tensor": 4}),
         "placed along axes of the mesh, {'replicate': 1, 'shard': 2, 'tensor': 4}; found axis 'tensor'"),
        (lambda: plan(leaf_on(named("dp_shard"), Shard(0)), mesh),
         "because make_plan cuts leaves along the data axes itself; found axis 'dp_shard', the data axis 'shard'"),
        (lambda: plan(DTensor.from_local(torch.zeros(4), tensor, [Partial()]), mesh),
         "must be placed by Shard or Replicate; found P(sum) along axis 'tensor': call redistribute on it"),
        (lambda: plan(leaf_on(tensor, Shard(0), shape=(3, 8)), mesh),
         "must be cut into equal slices; found shape (3, 8), cut along dim 0: choose a size that the 2 ranks"),
        (lambda: plan(leaf, mesh, local={"w": "tensor"}),
         "says itself along which axes it is local; found option local: leave it out of local"),
        (lambda: fs.shard({"w": leaf_on(tensor, Shard(1))}, own, mesh),
         "leaf 'w' of params must be a DTensor of shape (4, 6), placed by (Shard(dim=0),) on DeviceMesh"),
        (lambda: fs.shard({"w": leaf}, plan(torch.zeros(4, 6), mesh), mesh),
         "leaf 'w' of params is a DTensor, of which this rank holds a part; pass its full_tensor()"),
        (lambda: torch.func.grad(run)(shards),
         "leaf 'w' is a DTensor, and DTensors do not run inside torch.func transforms: use"),
        (lambda: fs.simulate(lambda mesh: fs.unshard(lambda p: p, unit, mesh), {"tensor": 2}),
         "must have a DeviceMesh with these axes; found {'replicate': 1, 'shard': 1, 'tensor': 2} without one: use"),
        (lambda: fs.fully_shard(apply, fs.make_plan(larger, mesh), mesh),
         "parameter 'weight' has shape (8, 6) in the plan and (4, 6) in the module"),
    ]  # fmt: skip
    for call, words in cases:
        with pytest.raises((ValueError, TypeError, RuntimeError), match=re.escape(words)):
            call()


def test_what_cannot_be_planned_or_run_is_an_error_that_names_the_leaf() -> None:
    run_ranks(refused, 2, shape={"tensor": 2})
