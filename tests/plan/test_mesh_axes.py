"""Plans for meshes with model axes, as data: positions of ranks, JSON, fingerprints, tables, predictions."""

import itertools
import time

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


LARGE = {"stage": 8, "replicate": 16, "shard": 16, "tensor": 8}


def test_a_plan_for_16384_ranks_is_made_printed_predicted_and_written_quickly():
    width, dims = 8192, {"qkv": 0, "out": 1, "up": 0, "down": 1}
    local = {f"blocks.*.{name}": {"tensor": dim} for name, dim in dims.items()}
    block = {"qkv": (3 * width // 8, width), "out": (width, width // 8), "norm": (width,)}
    block |= {"up": (width // 2, width), "down": (width, width // 2)}
    with torch.device("meta"):
        params = {"blocks": [{name: torch.empty(shape) for name, shape in block.items()} for _ in range(40)]}
    before = time.process_time()
    plan = fs.make_plan(params, LARGE, units=["blocks.*"], local=local)
    text, events = str(plan), fs.predict_events(plan)
    again = fs.Plan.from_json(plan.to_json())
    seconds = time.process_time() - before
    assert seconds < 5  # of one core; it takes about 0.3
    assert "16384 ranks = 8 stage × 16 replicate × 16 shard × 8 tensor" in text
    assert (again, again.fingerprint(), again.to_json()) == (plan, plan.fingerprint(), plan.to_json())
    assert (plan.world_size, plan.model_axes) == (16384, (("stage", 8), ("tensor", 8)))
    assert {leaf.whole_shape for leaf in plan.units["blocks.0"].leaves if leaf.path.endswith("qkv")} == {(3 * width, width)}
    first = plan.units["blocks.0"]  # a buffer of cut leaves, and one of leaves that are equal on all ranks
    reductions = [(e.kind, e.buffer, e.axis, e.ranks) for e in events if e.unit == "blocks.0" and e.kind != "all_gather"]
    keys = {bool(buffer.local): buffer.key for buffer in first.buffers}
    assert sorted(reductions) == sorted(
        [
            ("reduce_scatter", keys[True], "shard", 16), ("all_reduce", keys[True], "replicate", 16),
            ("all_reduce", keys[True], "stage", 8),
            ("reduce_scatter", keys[False], "shard", 16), ("all_reduce", keys[False], "replicate", 16),
            ("all_reduce", keys[False], "stage", 8), ("all_reduce", keys[False], "tensor", 8),
        ]
    )  # fmt: skip
