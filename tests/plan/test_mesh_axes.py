"""Plans for meshes with model axes, as data: positions of ranks, JSON, fingerprints, tables, predictions."""

import itertools

import pytest
import torch

import funcshard as fs
from funcshard.plan import mesh_axes_of, position_of, rank_at


@pytest.mark.parametrize(
    "axes", [{"shard": 4}, {"shard": 2, "tensor": 3}, {"replicate": 2, "shard": 1, "tensor": 2, "expert": 3}], ids=str
)
def test_ranks_are_numbered_row_by_row_and_the_last_axis_is_innermost(axes):
    places = list(itertools.product(*map(range, axes.values())))
    found = [position_of(rank, axes) for rank in range(len(places))]
    assert found == [dict(zip(axes, place, strict=True)) for place in places]
    assert all(list(at) == list(axes) for at in found)
    assert [rank_at(at, axes) for at in found] == list(range(len(places)))


SPELLINGS = [  # a mesh, and all its axes
    (3, {"replicate": 1, "shard": 3}),
    ({"shard": 3}, {"replicate": 1, "shard": 3}),
    ({"shard": 3, "replicate": 1}, {"replicate": 1, "shard": 3}),
    ({"shard": 2, "replicate": 3}, {"shard": 2, "replicate": 3}),
    ({"tensor": 2}, {"replicate": 1, "shard": 1, "tensor": 2}),
    ({"tensor": 2, "shard": 3}, {"replicate": 1, "tensor": 2, "shard": 3}),
    ({"stage": 2, "replicate": 3, "shard": 4, "tensor": 5}, {"stage": 2, "replicate": 3, "shard": 4, "tensor": 5}),
]


@pytest.mark.parametrize(("mesh", "axes"), SPELLINGS, ids=str)
def test_a_data_axis_that_is_left_out_has_one_rank_and_two_spellings_give_one_plan(mesh, axes):
    assert list(mesh_axes_of(mesh).items()) == list(axes.items())
    plan, other = (fs.make_plan({"w": torch.zeros(7)}, spelling) for spelling in (mesh, axes))
    assert plan == other
    assert plan.fingerprint() == other.fingerprint()
    assert len(axes) < 4 or plan != fs.make_plan({"w": torch.zeros(7)}, dict(reversed(axes.items())))


def test_a_plan_for_16384_ranks_reduces_each_buffer_along_the_axes_that_its_leaves_are_not_cut_along():
    mesh, cuts = {"stage": 8, "replicate": 16, "shard": 16, "tensor": 8}, {"qkv": 0, "out": 1}
    shapes = {"qkv": (3072, 8192), "out": (8192, 1024), "norm": (8192,)}
    params = {"blocks": [{name: torch.empty(shape, device="meta") for name, shape in shapes.items()} for _ in range(2)]}
    local = {f"blocks.*.{name}": {"tensor": dim} for name, dim in cuts.items()}
    plan = fs.make_plan(params, mesh, units=["blocks.*"], local=local)
    again = fs.Plan.from_json(plan.to_json())
    assert "16384 ranks = 8 stage × 16 replicate × 16 shard × 8 tensor" in str(plan)
    assert (again, again.fingerprint(), again.to_json()) == (plan, plan.fingerprint(), plan.to_json())
    assert (plan.world_size, plan.model_axes) == (16384, (("stage", 8), ("tensor", 8)))
    first = plan.units["blocks.0"]
    assert {leaf.whole_shape for leaf in first.leaves if leaf.path.endswith("qkv")} == {(8 * 3072, 8192)}
    reductions = [e for e in fs.predict_events(plan) if e.unit == first.name and e.kind != "all_gather"]
    for buffer in first.buffers:
        kinds = [("reduce_scatter", "shard", 16), ("all_reduce", "replicate", 16), ("all_reduce", "stage", 8)]
        kinds += [] if buffer.local else [("all_reduce", "tensor", 8)]
        assert sorted((e.kind, e.axis, e.ranks) for e in reductions if e.buffer == buffer.key) == sorted(kinds)
