"""Leaves that are DTensors: what the plan keeps of their placements, and what it refuses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import funcshard as fs
from funcshard.plan import LeafCut
from tests.ranks import run_ranks


def leaf_on(device_mesh: Any, *placements: Any, shape: tuple[int, ...] = (4, 6)) -> DTensor:
    return distribute_tensor(torch.arange(24.0).view(shape), device_mesh, placements)


def raised(f: Any) -> str:
    try:
        f()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


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


def refused(mesh: fs.Mesh) -> dict[str, str]:
    tensor = mesh.device_mesh["tensor"]
    named = lambda *names: init_device_mesh("cpu", (2,), mesh_dim_names=names or None)  # noqa: E731
    leaf = leaf_on(tensor, Shard(0))
    plan = lambda leaf, mesh=mesh, **options: fs.make_plan({"w": leaf}, mesh, **options)  # noqa: E731
    shards = fs.shard({"w": leaf}, plan(leaf), mesh)
    unit = plan(leaf).units[""]
    run = lambda shards: fs.unshard(lambda p: p["w"].to_local().sum(), unit, mesh)(shards[""])  # noqa: E731

    def simulated(mesh: fs.Mesh) -> Any:
        return fs.unshard(lambda p: p, unit, mesh)

    module = nn.Linear(6, 4)
    module.weight = nn.Parameter(leaf)
    apply, *_ = fs.make_functional(module)
    return {
        "no names": raised(lambda: plan(leaf_on(named(), Shard(0)))),
        "another axis": raised(lambda: plan(leaf_on(named("tp"), Shard(0)))),
        "another size": raised(lambda: plan(leaf, {"shard": 2, "tensor": 4})),
        "a data axis": raised(lambda: plan(leaf_on(named("dp_shard"), Shard(0)))),
        "not reduced": raised(lambda: plan(DTensor.from_local(torch.zeros(4), tensor, [Partial()]))),
        "unequal slices": raised(lambda: plan(leaf_on(tensor, Shard(0), shape=(3, 8)))),
        "local too": raised(lambda: plan(leaf, local={"w": "tensor"})),
        "other placements": raised(lambda: fs.shard({"w": leaf_on(tensor, Shard(1))}, plan(leaf), mesh)),
        "planned as plain": raised(lambda: fs.shard({"w": leaf}, plan(torch.zeros(4, 6)), mesh)),
        "a transform": raised(lambda: torch.func.grad(run)(shards)),
        "simulated ranks": raised(lambda: fs.simulate(simulated, {"tensor": 2})),
        "another module": raised(lambda: fs.fully_shard(apply, fs.make_plan(module_of_shape(8, tensor), mesh), mesh)),
    }


def module_of_shape(rows: int, tensor: Any) -> dict[str, torch.Tensor]:
    return {"weight": distribute_tensor(torch.zeros(rows, 6), tensor, [Shard(0)]), "bias": torch.zeros(4)}


WORDS = {
    "no names": "ValueError: leaf 'w' is a DTensor, which must lie on a DeviceMesh whose axes have names; found none: pass",
    "another axis": "must be placed along axes of the mesh, {'replicate': 1, 'shard': 1, 'tensor': 2}; found axis 'tp' of 2",
    "another size": "must be placed along axes of the mesh, {'replicate': 1, 'shard': 2, 'tensor': 4}; found axis 'tensor'",
    "a data axis": "must be placed along model axes only, because make_plan cuts leaves along the data axes itself; found "
    "axis 'dp_shard', the data axis 'shard': parallelize the module over the other axes",
    "not reduced": "must be placed by Shard or Replicate; found P(sum) along axis 'tensor': call redistribute on it",
    "unequal slices": "must be cut into equal slices; found shape (3, 8), cut along dim 0: choose a size that the 2 ranks",
    "local too": "says itself along which axes it is local; found option local: leave it out of local",
    "other placements": "leaf 'w' of params must be a DTensor of shape (4, 6), placed by (Shard(dim=0),) on DeviceMesh",
    "planned as plain": "leaf 'w' of params is a DTensor, of which this rank holds a part; pass its full_tensor()",
    "a transform": "RuntimeError: leaf 'w' is a DTensor, and DTensors do not run inside torch.func transforms: use",
    "simulated ranks": "leaf 'w' is a DTensor along ['tensor'], so the mesh must have a DeviceMesh with these axes; found "
    "{'replicate': 1, 'shard': 1, 'tensor': 2} without one: use init_mesh or Mesh.from_device_mesh in real processes",
    "another module": "parameter 'weight' has shape (8, 6) in the plan and (4, 6) in the module",
}


def test_what_cannot_be_planned_or_run_is_an_error_that_names_the_leaf() -> None:
    for found in run_ranks(refused, 2, shape={"tensor": 2}):
        assert found.keys() == WORDS.keys()
        for name, words in WORDS.items():
            assert words in found[name], (name, found[name])
